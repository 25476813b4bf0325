"""One function per operation: kernel or plain PyTorch, as the execution mode says."""
