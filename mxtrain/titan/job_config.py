"""What ``job.custom_config_module = "mxtrain.titan.job_config"`` names: TorchTitan merges this class into its own."""

from mxtrain.settings.sections import JobConfig

__all__ = ["JobConfig"]
