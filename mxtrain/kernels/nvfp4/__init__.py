"""NVFP4 casts."""
