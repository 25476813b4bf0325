"""Settings of ``[model_args]``: which each model has, where TorchTitan has them, and sizes that do not fit."""

from collections.abc import Iterable, Iterator, Mapping

from mxtrain.errors import ConfigError
from mxtrain.settings.fields import Problems, Settings

SECTION = "model_args"


def _same(names: str) -> dict[str, str]:
    return {name: name for name in names.split()}


_COMMON = _same("dim n_layers n_heads norm_eps rope_theta") | {"max_seq_len": ""}  # a model has training.seq_len
_LLAMA_ROPE = {
    "rope_factor": "rope_scaling_args.scaling_factor",
    "rope_low_freq_factor": "rope_scaling_args.low_freq_factor",
    "rope_high_freq_factor": "rope_scaling_args.high_freq_factor",
    "rope_original_seq_len": "rope_scaling_args.original_max_position_embeddings",
}
_DEEPSEEK_ROPE = {"rope_factor": "rope_factor", "rope_original_seq_len": "original_seq_len"}
_EXPERTS = {name: f"moe_args.{name}" for name in ("num_experts", "top_k", "load_balance_coeff")}
_SHARED_EXPERTS = {"num_shared_experts": "moe_args.num_shared_experts"}
_LATENT = _same("q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim")

PLACES = {
    "llama3": _COMMON | _same("n_kv_heads hidden_dim enable_weight_tying") | _LLAMA_ROPE,
    "llama4": _COMMON | _LLAMA_ROPE | _EXPERTS | _SHARED_EXPERTS
    | _same("n_kv_heads multiple_of ffn_dim_multiplier interleave_moe_layer_step"),
    "qwen3": _COMMON | _same("n_kv_heads head_dim hidden_dim enable_weight_tying moe_inter_dim") | _EXPERTS,
    "deepseek_v3": _COMMON | _DEEPSEEK_ROPE | _LATENT | _EXPERTS | _SHARED_EXPERTS
    | {"hidden_dim": "inter_dim"} | _same("n_dense_layers moe_inter_dim"),
}  # fmt: skip
"""Name of a model -> its settings in ``[model_args]`` -> the field of TorchTitan's model arguments ("" for none)"""

_LLAMA32 = dict(n_kv_heads=8, hidden_dim=8192, vocab_size=128256)
_TIED = dict(rope_factor=32.0, enable_weight_tying=True)  # its context is scaled four times as far as Llama 3.1's
OWN_FLAVORS = {
    "llama3": {
        "125M": dict(dim=768, n_layers=12, n_heads=12, hidden_dim=2048, vocab_size=32768),
        # The shape of Llama 3.2 1B with a separate output matrix: 1.5 billion parameters in total.
        "1B": dict(dim=2048, n_layers=16, n_heads=32, **_LLAMA32),
        "3.2-1B": dict(dim=2048, n_layers=16, n_heads=32, **_LLAMA32, **_TIED),
        "3.2-3B": dict(dim=3072, n_layers=28, n_heads=24, **_LLAMA32, **_TIED),
    },
    "qwen3": {
        # Smaller than TorchTitan's debugmodel_moe: its 300 million parameters take a CPU one minute per step.
        "debugmodel_moe_16": dict(
            dim=256, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=768, moe_inter_dim=256,
            num_experts=16, top_k=4, vocab_size=2048,
        ),
    },
}  # fmt: skip
"""Name of a model -> flavors that TorchTitan does not have -> their sizes, others being those of its debug model"""

Misfits = Iterator[tuple[tuple[str, ...], str]]
"""Names of sizes that can be at fault, and what is wrong with them"""


def given_in(job_config) -> dict[str, object]:
    """Return the settings of ``[model_args]`` that are set, by their names without the table."""
    section = getattr(job_config, SECTION, None)  # plain -m torchtitan.train may declare other sections
    return {} if section is None else {name: value for name, value in vars(section).items() if value is not None}


def model_problems(settings: Settings) -> Problems:
    """Settings of ``[model_args]`` that the model does not have."""
    s, model = settings.values, settings["model.name"]
    for name in given_in(s):
        if model not in PLACES:
            yield (
                f"{SECTION}.{name}",
                f"has no effect on model.name = {model!r}; [{SECTION}] is for {', '.join(PLACES)}",
            )
        elif name not in PLACES[model]:
            has = ", ".join(PLACES[model])
            yield f"{SECTION}.{name}", f"is not a size of model.name = {model!r}; its sizes are {has}"
    if (longest := s.model_args.max_seq_len) is not None and longest < s.training.seq_len:
        problem = f"is less than training.seq_len = {s.training.seq_len}; raise it to that or more"
        yield f"{SECTION}.max_seq_len", problem


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
        yield ("hidden_dim",), f"has no effect: all layers of model.flavor = {flavor!r} have experts; set moe_inter_dim"
    elif model == "qwen3":
        names = ("num_experts", "top_k", "load_balance_coeff", "moe_inter_dim")
        yield names, f"has no effect, because model.flavor = {flavor!r} has no experts; 'debugmodel_moe_16' has"


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
