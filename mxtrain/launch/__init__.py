"""How kernels are launched, how code of ours appears to PyTorch, and PyTorch's private names."""
