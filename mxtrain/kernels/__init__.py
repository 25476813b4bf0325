"""Triton kernels, one operation per file: kernel, launcher, op, public function. They import no reference code."""
