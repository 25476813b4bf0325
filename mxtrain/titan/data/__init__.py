"""TorchTitan's data loading from prepared texts."""
