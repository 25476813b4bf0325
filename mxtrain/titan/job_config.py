"""TorchTitan's job config from the settings of a job.

``job.custom_config_module = "mxtrain.titan.job_config"`` names this module, whose ``JobConfig`` TorchTitan
merges into its own.
"""

from dataclasses import field, fields, is_dataclass, make_dataclass
from importlib import import_module
from types import SimpleNamespace

from mxtrain.data.config import DATASETS
from mxtrain.errors import require_one_of
from mxtrain.settings.fields import Settings
from mxtrain.settings.model_settings import absent, given_in, refuse, wrong_sizes
from mxtrain.settings.read import import_own, read_settings
from mxtrain.settings.sections import JobConfig
from mxtrain.titan.converters import active_settings
from mxtrain.titan.data import check_datasets, validation_dataset
from mxtrain.titan.releases import engine


def parse_job_config(args: list[str]):
    """Parse command-line arguments into TorchTitan's job config, and check it.

    Raises:
        ConfigError: for every mistake that shows without the machine, building the model or reading data.
    """
    settings = read_settings(args)
    check_model(settings.values)
    return job_config_of(settings)


def check_model(job: SimpleNamespace) -> None:
    """Raise ConfigError for unknown names, wrong settings of converters, and sizes that the model cannot have.

    Args:
        job: TorchTitan's job config, or ``Settings.values``.
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
    engine().refuse_gone(job)
    require_one_of("model.name", job.model.name, engine().models())
    require_one_of("model.flavor", job.model.flavor, engine().SizedModel.flavors(job.model.name))
    for name in job.model.converters:
        require_one_of("model.converters", name, engine().converters())
    check_datasets(job)
    if job.validation.enable:  # whose text mxtrain's loaders read
        require_one_of("validation.dataset", validation_dataset(job), DATASETS)


def job_config_of(settings: Settings):
    """Return TorchTitan's job config with the values of ``settings``."""
    kind = _merged(engine().JobConfig, JobConfig)
    if module := settings["job.custom_config_module"]:
        kind = _merged(kind, import_module(module).JobConfig)
    return _filled(kind, settings.tables())


def _merged(base: type, own: type) -> type:
    """Return a dataclass with the fields of ``base`` and ``own``. Of two with one name, tables are merged, too."""
    theirs, added = {f.name: f.type for f in fields(base)}, []
    for f in fields(own):
        if is_dataclass(f.type) and is_dataclass(theirs.get(f.name)):
            kind = _merged(theirs[f.name], f.type)
            added.append((f.name, kind, field(default_factory=kind)))
        else:
            added.append((f.name, f.type, f))
    return make_dataclass(base.__name__, added, bases=(base,))


def _filled(kind: type, tables: dict):
    """Return an instance of a dataclass with the values in nested tables."""
    given = {f.name: f.type for f in fields(kind) if f.name in tables}
    return kind(**{name: _filled(t, tables[name]) if is_dataclass(t) else tables[name] for name, t in given.items()})
