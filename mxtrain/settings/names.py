"""Names of models, flavors, converters and datasets that nobody knows.

The launcher checks them without PyTorch. A user's own module may register more of them when the workers import it, so
with such a module the launcher leaves all names to the workers, which check them again.
"""

from mxtrain.settings.registry import ALL_DATASETS, CONVERTERS, FLAVORS
from mxtrain.settings.relations import Relation, check, unknown_among
from mxtrain.settings.values import Settings

RELATIONS = (
    Relation("model.name", lambda s: unknown_among(s["model.name"], FLAVORS)),
    Relation(
        "model.flavor",
        lambda s: unknown_among(s["model.flavor"], FLAVORS[s["model.name"]]),
    ),
    Relation(
        "model.converters",
        lambda s: next(
            (
                f"has {name!r}, which {unknown_among(name, CONVERTERS)}"
                for name in s["model.converters"]
                if name not in CONVERTERS
            ),
            None,
        ),
    ),
    Relation("training.dataset", lambda s: unknown_among(s["training.dataset"], ALL_DATASETS)),
    Relation(
        "validation.dataset",
        lambda s: s["validation.enable"] and unknown_among(s["validation.dataset"], ("", *ALL_DATASETS)),
    ),
)


def check_names(settings: Settings) -> None:
    """Raise ConfigError for an unknown name, unless the user's own module may register more of them."""
    if settings["experimental.custom_import"] in ("", "mxtrain.titan"):
        check(RELATIONS, settings)
