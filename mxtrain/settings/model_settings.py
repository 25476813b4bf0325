"""Which settings of ``[model_args]`` each model has, and where they stand in TorchTitan's model arguments."""

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


def given_in(job_config) -> dict[str, object]:
    """Return the settings of ``[model_args]`` that are set, by their names without the table.

    Args:
        job_config: TorchTitan's job config, or ``Settings.values``.
    """
    section = getattr(job_config, SECTION, None)  # plain -m torchtitan.train may declare other sections
    return {} if section is None else {name: value for name, value in vars(section).items() if value is not None}


def model_problems(settings: Settings) -> Problems:
    """Settings of ``[model_args]`` that the model does not have."""
    s, model = settings.values, settings["model.name"]
    for name in given_in(s):
        if model not in PLACES:
            yield (
                f"{SECTION}.{name}",
                f"has no effect on model.name = {model!r}: [{SECTION}] is for {', '.join(PLACES)}",
            )
        elif name not in PLACES[model]:
            has = ", ".join(PLACES[model])
            yield f"{SECTION}.{name}", f"is no setting of model.name = {model!r}, which has: {has}"
    if (longest := s.model_args.max_seq_len) is not None and longest < s.training.seq_len:
        problem = f"is less than training.seq_len = {s.training.seq_len}: allowed is that or more"
        yield f"{SECTION}.max_seq_len", problem
