"""The settings of a job, from TOML files and flags, checked before anything is built.

This folder imports neither PyTorch nor TorchTitan, so that a mistake is found within a second.
"""
