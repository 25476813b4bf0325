"""Worker of ``torchrun ... -m mxtrain.train --job.config_file CONFIG.toml [any TorchTitan flag]``."""

from mxtrain.titan.train import main

if __name__ == "__main__":
    main()
