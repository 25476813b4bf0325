"""Read runs back from their folders: tables, loss curves, the summary printed after a run.

Imports neither PyTorch nor TorchTitan, and matplotlib only when something is drawn.
"""

from mxtrain.analysis.metrics_file import MetricsWriter, read_metrics
from mxtrain.analysis.plots import plot
from mxtrain.analysis.reports import closing_summary, summary, table
from mxtrain.analysis.runs import Run, load_run

__all__ = ["MetricsWriter", "Run", "closing_summary", "load_run", "plot", "read_metrics", "summary", "table"]
