"""Sizes of a model that do not fit one another, or that its flavor does not have."""

from collections.abc import Iterable, Iterator, Mapping

from mxtrain.errors import ConfigError
from mxtrain.settings.model_settings import SECTION

Misfits = Iterator[tuple[tuple[str, ...], str]]
"""Names of sizes that can be at fault, and what is wrong with them"""


def refuse(given: Mapping[str, object], misfits: Iterable[tuple[tuple[str, ...], str]]) -> None:
    """Raise ConfigError for the first misfit that a setting in ``[model_args]``, ``given``, has a part in.

    What a flavor has by itself is not judged.
    """
    for names, problem in misfits:
        if named := [name for name in names if name in given]:
            raise ConfigError(f"{SECTION}.{named[0]} = {given[named[0]]!r} {problem}")


def absent(model: str, flavor: str, has_experts: bool) -> Misfits:
    """Settings of layers that a flavor does not have, and why."""
    if model == "qwen3" and has_experts:
        yield ("hidden_dim",), f"has no effect: all layers of model.flavor = {flavor!r} have experts: set moe_inter_dim"
    elif model == "qwen3":
        names = ("num_experts", "top_k", "load_balance_coeff", "moe_inter_dim")
        yield names, f"has no effect: model.flavor = {flavor!r} has no experts; 'debugmodel_moe_16' has"


def wrong_sizes(model: str, sizes: Mapping[str, object]) -> Misfits:
    """Settings with sizes that do not divide one another, or numbers in the wrong order, and what is wrong.

    Args:
        sizes: those of the model, by their names in ``[model_args]``; if there are any, the number of "groups" of
            experts, and how many a token uses ("limited_groups").
    """
    dim, heads = sizes["dim"], sizes["n_heads"]
    if model in ("llama3", "llama4"):
        if dim % heads:
            yield ("n_heads", "dim"), f"does not fit: dim = {dim} is no multiple of n_heads = {heads}"
        if dim // heads % 2:
            where = f"a head has dim / n_heads = {dim // heads} features"
            yield ("n_heads", "dim"), f"does not fit: {where}, and rotation needs an even number"
        low, high = (sizes.get(f"rope_{end}_freq_factor", 0) for end in ("low", "high"))
        if low > high:
            order = f"rope_low_freq_factor = {low} is more than rope_high_freq_factor = {high}"
            yield ("rope_low_freq_factor", "rope_high_freq_factor"), f"does not fit: {order}"
    rotated = {"qwen3": "head_dim", "deepseek_v3": "qk_rope_head_dim"}.get(model)
    if rotated and sizes[rotated] % 2:
        yield (rotated,), "is odd, and rotation needs an even number"
    if model == "deepseek_v3":
        dense, layers = sizes["n_dense_layers"], sizes["n_layers"]
        if dense > layers:
            yield (
                ("n_dense_layers", "n_layers"),
                f"does not fit: n_dense_layers = {dense} is more than n_layers = {layers}",
            )
    elif heads % (kv_heads := sizes["n_kv_heads"] or heads):
        yield ("n_kv_heads", "n_heads"), f"does not fit: n_heads = {heads} is no multiple of n_kv_heads = {kv_heads}"
    if experts := sizes.get("num_experts"):
        groups, open_groups = sizes.get("groups") or 1, sizes.get("limited_groups") or 1
        if (top_k := sizes["top_k"]) > experts // groups * open_groups:
            among = f" in {open_groups} of the flavor's {groups} groups" if groups > 1 else ""
            yield ("top_k", "num_experts"), f"does not fit: top_k = {top_k} is more than num_experts = {experts}{among}"
        if experts % groups:
            yield ("num_experts",), f"is no multiple of the flavor's {groups} groups of experts"
