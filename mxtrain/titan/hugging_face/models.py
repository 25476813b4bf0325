"""TorchTitan's models under their Hugging Face names: the flavor of a shape, names of parameters and order of rows."""

import re

import torch

from mxtrain.errors import ConfigError
from mxtrain.hugging_face.model_config import ARCHITECTURES, CONFIG_FILE, ModelShape, Parameter, settings_of, shape_of
from mxtrain.settings.model_settings import wrong_sizes
from mxtrain.titan.releases import engine

LONG = 2**30
"""More positions than any model has: TorchTitan scales DeepSeek's rotation in long sequences only"""


def find_model(shape: ModelShape, where: str) -> tuple[str, dict[str, object], object]:
    """Find the flavor that needs the fewest settings of [model_args] to have a shape.

    Returns:
        The flavor, the settings, and the ``SizedModel`` of this shape.
    """
    name, found = ARCHITECTURES[shape.model_type].model, []
    sized_model, asked = engine().SizedModel, {**vars(shape), **shape.own}
    for flavor in sized_model.flavors(name):
        own = sized_model.of_flavor(name, flavor, {}, shape.vocab_size, LONG)
        if shape_of(own, shape.max_position_embeddings).model_type != shape.model_type:
            continue
        sizes = {**own.sizes, "n_kv_heads": own.sizes.get("n_kv_heads") or shape.num_attention_heads}
        settings = {setting: value for setting, value in settings_of(shape).items() if sizes.get(setting) != value}
        model = sized_model.of_flavor(name, flavor, settings, shape.vocab_size, LONG)
        closest = shape_of(model, shape.max_position_embeddings)
        has = {**vars(closest), **closest.own, "own": shape.own}
        if shape.model_type == "qwen3_moe":  # no layer has this size
            has["intermediate_size"] = shape.intermediate_size
        misfits = [(field, value, has[field]) for field, value in asked.items() if has[field] != value]
        found.append((flavor, settings, model, misfits))
    if not found:
        raise ConfigError(f"{where}: the installed TorchTitan has no model of model_type = {shape.model_type!r}")
    flavor, settings, model, misfits = min(found, key=lambda candidate: (len(candidate[3]), len(candidate[1])))
    for field, value, other in misfits:
        raise ConfigError(
            f"{where}: {field} = {value!r} in {CONFIG_FILE} must be {other!r} for TorchTitan's {model.name}"
        )
    for _, problem in wrong_sizes(model.name, model.sizes):
        raise ConfigError(f"{where}: {CONFIG_FILE} {problem}")
    return flavor, settings, model


def parameters(model) -> dict[str, Parameter]:
    """Return the place of each parameter in Hugging Face's model, by TorchTitan's own adapter.

    Hugging Face does not have the second of two tied weights.
    """
    tied, adapter = model.sizes.get("enable_weight_tying", False), model.adapter()
    found, orders = {}, {}
    for name, weight in model.on_meta().state_dict().items():
        fqn = engine().saved_name(name)
        if tied and fqn == "output.weight":
            found[fqn] = Parameter(tuple(weight.shape), ())
            continue
        kind = (re.sub(r"\d+", "{}", fqn), weight.shape)
        if kind not in orders:
            orders[kind] = _row_order(adapter, name, weight.shape)
        found[fqn] = Parameter(tuple(weight.shape), tuple(adapter.to_hf({name: weight})), orders[kind])
    return found


def _row_order(adapter, name: str, shape: torch.Size) -> torch.Tensor | None:
    """Let the adapter permute the numbers of the rows. Return None if they stay in order, or are no matrix."""
    if len(shape) != 2:
        return None
    numbers = torch.arange(shape[0], dtype=torch.int32)
    (permuted,) = adapter.to_hf({name: numbers[:, None].expand(*shape)}).values()
    order = permuted[:, 0].long()
    return None if torch.equal(order, numbers.long()) else order
