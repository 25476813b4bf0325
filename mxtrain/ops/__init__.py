"""One function per operation. The execution mode decides whether a kernel or plain PyTorch runs it."""
