"""Reads runs from their folders: tables, loss curves, and the summary printed after a run.

Imports neither PyTorch nor TorchTitan, and imports matplotlib only to draw.
"""

from mxtrain.analysis.metrics_file import MetricsWriter, read_metrics
from mxtrain.analysis.plots import plot
from mxtrain.analysis.runs import Run, load_run
from mxtrain.analysis.tables import closing_summary, summary, table

__all__ = ["MetricsWriter", "Run", "closing_summary", "load_run", "plot", "read_metrics", "summary", "table"]
