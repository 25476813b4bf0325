"""Autograd functions and modules: MXNorm with its linears, and the MX linear without a norm."""
