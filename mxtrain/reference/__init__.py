"""Every operation in plain PyTorch: the oracles of the kernels, and the code that runs on a CPU."""
