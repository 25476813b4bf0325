"""The settings of a job, with the checks that need TorchTitan.

``job.custom_config_module = "mxtrain.titan.job_config"`` names this module, whose ``JobConfig`` TorchTitan
merges into its own.
"""

from mxtrain.data.config import DATASETS
from mxtrain.errors import require_one_of
from mxtrain.settings.model_settings import absent, given_in, refuse, wrong_sizes
from mxtrain.settings.read import import_own, read_settings
from mxtrain.settings.sections import JobConfig as JobConfig
from mxtrain.titan.converters import active_settings
from mxtrain.titan.data import check_datasets, validation_dataset
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
    check_names(job)
    active_settings(job)
    if given := given_in(job):
        model, sizes = job.model.name, engine().sizes_of(job)
        has_experts = "num_experts" in sizes
        refuse(given, (*absent(model, job.model.flavor, has_experts), *wrong_sizes(model, sizes)))


def check_names(job) -> None:
    """Raise ConfigError for a model, flavor, converter or dataset that nobody has registered."""
    if own := job.experimental.custom_import:
        import_own("experimental.custom_import", own)  # it registers names; TorchTitan imports it later
    require_one_of("model.name", job.model.name, engine().models())
    require_one_of("model.flavor", job.model.flavor, engine().SizedModel.flavors(job.model.name))
    for name in job.model.converters:
        require_one_of("model.converters", name, engine().converters())
    check_datasets(job)
    if job.validation.enable:  # whose text mxtrain's loaders read
        require_one_of("validation.dataset", validation_dataset(job), DATASETS)
