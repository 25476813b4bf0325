"""Triton kernels, one operation a file: kernel, launcher, custom op with its fake. They import no reference code."""
