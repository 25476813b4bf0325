"""Layouts of a run over processes."""
