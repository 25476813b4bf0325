"""Plain PyTorch versions of every operation: the oracles of the kernels, and what runs on a CPU."""
