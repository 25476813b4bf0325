"""MXFP8 casts."""
