"""Swap modules of a model: a survey, a plan, and the swap.

The folder is not called ``convert``: that name would hide the function ``mxtrain.convert``.
"""
