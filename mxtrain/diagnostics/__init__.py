"""Figures that say how good the estimate and the casts of a layer are, computed from a sample of its real tensors.

The plan of every figure is the same. A function turns tensors into ``Totals``: sums, least and largest values. The
totals of several processes are combined exactly. A second function turns combined totals into figures.
"""
