"""Models in Hugging Face's format: config.json, safetensors files, folded gains. Knows nothing of TorchTitan."""
