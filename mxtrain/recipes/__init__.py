"""What the operands of every GEMM are cast to, and how a norm gets its RMS."""
