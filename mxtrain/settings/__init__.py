"""The settings of a job, from TOML files and flags, checked before anything is built.

A setting is declared once: mxtrain's in ``sections``, what mxtrain says about TorchTitan's in ``known``, which imports
TorchTitan's own class when settings are read.
"""
