"""Recipes: which format every GEMM casts its operands to, and how MXNorm estimates the RMS."""
