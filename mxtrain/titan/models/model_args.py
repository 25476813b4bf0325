"""``[model_args]`` on TorchTitan's model arguments: sets the fields, and checks that they go together."""

from collections.abc import Iterator, Mapping
from functools import reduce

from torchtitan.models.llama4.model.args import RoPEScalingArgs
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.errors import ConfigError
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.recipe import LinearRecipe
from mxtrain.settings.model_settings import PLACES, SECTION
from mxtrain.settings.mxnorm_section import quantizing_among

Problem = tuple[tuple[str, ...], bool, str]
"""Settings, the first of which is named; whether they are wrong; what is wrong"""


def given_in(job_config) -> dict[str, object]:
    """Return the settings of ``[model_args]`` that a job config gives."""
    section = getattr(job_config, SECTION, None)  # plain -m torchtitan.train may declare other sections
    return {} if section is None else {name: value for name, value in vars(section).items() if value is not None}


def set_model_args(model: str, args, given: Mapping[str, object]) -> None:
    """Set fields of TorchTitan's model arguments in place.

    Args:
        model: one of ``PLACES``.
        args: TorchTitan's model arguments of a flavor.
        given: settings of ``[model_args]`` by their names.
    """
    for name, place in PLACES[model].items():  # in this order: llama3's hidden size depends on dim
        if place and name in given:
            *path, last = place.split(".")
            if path == ["rope_scaling_args"] and args.rope_scaling_args is None:
                args.rope_scaling_args = RoPEScalingArgs()
            value = None if name == "load_balance_coeff" and given[name] == 0 else given[name]
            setattr(reduce(getattr, path, args), last, value)


def check_model_args(job_config) -> None:
    """Raise ConfigError for settings of ``[model_args]`` that the flavor or one another rule out."""
    given = given_in(job_config)
    if not given:
        return
    model, flavor = job_config.model.name, job_config.model.flavor
    args = get_train_spec(model).model_args[flavor]
    if not getattr(args, "takes_model_args", False):
        raise ConfigError(
            f"{SECTION}.{next(iter(given))} = {next(iter(given.values()))!r} has no effect: model.name = {model!r} is "
            f"registered by experimental.custom_import = {job_config.experimental.custom_import!r}"
        )
    args.set_model_args(given)
    for problems in (_absent(model, flavor, args), _sizes(model, args), _blocks(model, args, job_config)):
        _raise_first(problems, given)


def wrong_size(model: str, args) -> str | None:
    """Return what is wrong with the sizes in TorchTitan's model arguments, if anything."""
    return next((problem for _, is_wrong, problem in _sizes(model, args) if is_wrong), None)


def _raise_first(problems: Iterator[Problem], given: Mapping[str, object]) -> None:
    """Raise ConfigError for the first problem with a given setting. What a flavor has by itself is not judged here."""
    for names, is_wrong, problem in problems:
        named = [name for name in names if name in given]
        if is_wrong and named:
            raise ConfigError(f"{SECTION}.{named[0]} = {given[named[0]]!r} {problem}")


def _absent(model: str, flavor: str, args) -> Iterator[Problem]:
    """Settings of layers that a flavor does not have."""
    if model == "qwen3":
        where = f"model.flavor = {flavor!r}"
        for name in ("num_experts", "top_k", "load_balance_coeff", "moe_inter_dim"):
            yield (name,), not args.moe_enabled, f"has no effect: {where} has no experts; 'debugmodel_moe_16' has"
        yield ("hidden_dim",), args.moe_enabled, f"has no effect: all layers of {where} have experts: set moe_inter_dim"


def _sizes(model: str, args) -> Iterator[Problem]:
    """Sizes that do not divide one another, and numbers in the wrong order."""
    dim, heads = args.dim, args.n_heads
    if model in ("llama3", "llama4"):
        yield ("n_heads", "dim"), dim % heads > 0, f"does not fit: dim = {dim} is no multiple of n_heads = {heads}"
        rotated, where = dim // heads, f"a head has dim / n_heads = {dim // heads} features"
        yield ("n_heads", "dim"), rotated % 2 > 0, f"does not fit: {where}, and rotation needs an even number"
        rope = args.rope_scaling_args
        if rope is not None:
            low, high = rope.low_freq_factor, rope.high_freq_factor
            order = f"does not fit: rope_low_freq_factor = {low} is more than rope_high_freq_factor = {high}"
            yield ("rope_low_freq_factor", "rope_high_freq_factor"), low > high, order
    rotated_name = {"qwen3": "head_dim", "deepseek_v3": "qk_rope_head_dim"}.get(model)
    if rotated_name:
        yield (rotated_name,), getattr(args, rotated_name) % 2 > 0, "is odd, and rotation needs an even number"
    if model != "deepseek_v3":
        kv_heads = args.n_kv_heads or heads
        fit = f"does not fit: n_heads = {heads} is no multiple of n_kv_heads = {kv_heads}"
        yield ("n_kv_heads", "n_heads"), heads % kv_heads > 0, fit
    if model == "deepseek_v3":
        layers = f"does not fit: n_dense_layers = {args.n_dense_layers} is more than n_layers = {args.n_layers}"
        yield ("n_dense_layers", "n_layers"), args.n_dense_layers > args.n_layers, layers
    if experts := getattr(args, "moe_args", None):
        used = f"does not fit: top_k = {experts.top_k} is more than num_experts = {experts.num_experts}"
        yield ("top_k", "num_experts"), experts.top_k > experts.num_experts, used
        groups = experts.num_expert_groups
        fit = f"is no multiple of the flavor's {groups} groups of experts"
        yield ("num_experts",), bool(groups) and experts.num_experts % groups > 0, fit


def _blocks(model: str, args, job_config) -> Iterator[Problem]:
    """Features that no block of a quantizing converter divides. With filters, only the converter knows its layers."""
    section = job_config.mxnorm
    if not quantizing_among(job_config.model.converters) or section.filter_fqns is not None or section.recipes:
        return
    block = _block_size(get_recipe(section.recipe))
    why = f"no multiple of {block}, the block size of mxnorm.recipe = {section.recipe!r}"
    for settings, features in _features(model, args).items():
        yield settings, features % block > 0, f"does not fit: a linear would have {features} features, {why}"


def _block_size(recipe: LinearRecipe) -> int:
    """The largest block along which a recipe's norm or GEMMs go."""
    return max(gemm.block_size for gemm in recipe.gemms if gemm.format is not None or gemm == recipe.fprop)


def _features(model: str, args) -> dict[tuple[str, ...], int]:
    """The features of the dense linears by the settings that decide on them."""
    features = {("dim",): args.dim}
    if model == "deepseek_v3":
        features |= {
            ("kv_lora_rank",): args.kv_lora_rank,
            ("kv_lora_rank", "qk_rope_head_dim"): args.kv_lora_rank + args.qk_rope_head_dim,
            ("q_lora_rank",): args.q_lora_rank,
            ("n_heads", "v_head_dim"): args.n_heads * args.v_head_dim,
            ("hidden_dim",): args.inter_dim,
        }
    else:
        head_dim = args.head_dim if model == "qwen3" else args.dim // args.n_heads
        features |= {
            ("n_heads", "head_dim"): args.n_heads * head_dim,
            ("n_kv_heads", "n_heads", "head_dim", "dim"): (args.n_kv_heads or args.n_heads) * head_dim,
        }
        if model != "llama4":
            features[("hidden_dim", "dim")] = args.hidden_dim
    return features
