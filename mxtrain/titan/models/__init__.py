"""TorchTitan's models with mxtrain's flavors, data and checks."""
