"""Runs to Hugging Face folders and back."""
