"""Swap modules of a model, in three steps that each run once:

1. ``survey`` looks at the model and returns facts as plain values. It changes nothing.
2. ``Converter.plan`` turns facts and settings into a ``Plan``: what every module becomes, or why it stays.
3. ``convert`` carries the plan out.

The folder is not called ``convert``: that name would hide the function ``mxtrain.convert``.
"""
