"""Models in Hugging Face's format: config.json, safetensors files, folded gains. Imports nothing of TorchTitan."""
