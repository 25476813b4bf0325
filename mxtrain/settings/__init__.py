"""The settings of a job, from TOML files and flags, checked before anything is built.

A setting is declared once: mxtrain's in ``sections``, TorchTitan's in its own dataclasses, of which ``titan`` narrows
some types when settings are read.
"""
