"""The settings of a job, with the checks that need TorchTitan.

``job.custom_config_module = "mxtrain.titan.job_config"`` names this module, whose ``JobConfig`` TorchTitan
merges into its own.
"""

from mxtrain.settings.read import read_settings
from mxtrain.settings.sections import JobConfig as JobConfig
from mxtrain.titan.converters import active_settings
from mxtrain.titan.releases import engine


def parse_job_config(args: list[str]):
    """Parse command-line arguments into a job's settings as attributes, and check them.

    Raises:
        ConfigError: for every mistake that shows without the machine, building the model or reading data.
    """
    job = read_settings(args).values
    check_model(job)
    return job


def check_model(job) -> None:
    """Raise ConfigError for unknown names, wrong settings of converters, and sizes that the model cannot have.

    Args:
        job: ``Settings.values``, or TorchTitan's job config.
    """
    engine().check_names(job)
    active_settings(job)
    engine().check_model_args(job)
