"""Swap modules of a model: survey, plan, swap."""
