"""Modules and autograd functions: MXNorm with its linears, MXLinear, FusedRMSNorm and the router's gate."""
