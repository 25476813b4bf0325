"""What computes with formats that have one E8M0 (power of two) scale per block of 32: plain PyTorch, and kernels."""
