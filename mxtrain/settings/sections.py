"""mxtrain's TOML sections, and its fields in TorchTitan's sections.

The sections are ``[mxnorm]``, ``[fused_norm]``, ``[decompose_k_router]``, ``[model_args]`` and
``[data]``.

``resume`` of a class says what a resumed run does with its fields. The type of a field says it for this one where that
is something else.

With ``job.custom_config_module = "mxtrain.titan.job_config"`` TorchTitan merges ``JobConfig`` into its own job config,
and shows the docstring under each field in ``--help``. This file must not postpone annotations: TorchTitan's merge of
nested tables cannot read field types that are strings.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mxtrain.formats.estimate import ESTIMATORS, P_VALUES
from mxtrain.formats.recipe import BACKWARDS, FOUR_OVER_SIX, FOUR_OVER_SIX_ERRORS, SCALE_ROUNDINGS, TENSOR_SCALES
from mxtrain.settings.types import (
    Amount,
    FinitePositive,
    Free,
    Groups,
    LocalPath,
    Names,
    NotNegative,
    Positive,
    Refused,
    Resume,
    Schedule,
    ShareBelowOne,
    Table,
    VocabularySize,
)


@dataclass
class Diagnostics:
    resume = Resume.FREE

    every: NotNegative = 0
    """Measure norms, casts, products and routers in every step that is a multiple of this; 0 is off"""

    fqns: Names = None
    """
    Modules to measure, named as in mxnorm.filter_fqns. Unset: every swapped norm, linear and experts, and their routers
    """

    tokens: Groups = 512
    """Tokens per process that are measured, a multiple of 32, spread over the first sequences"""


@dataclass
class MXNorm:
    resume = Resume.REFUSED

    p: Literal[P_VALUES] = 2
    """Exponent of the p-mean of block maxima that estimates the RMS: 1 or 2"""
    recipe: str = "mxfp8"
    """
    Format of all operands: "mxfp8", "mxfp8_2d" (weights in tiles), "mxfp4", "nvfp4", "nvfp4_dynamic" (scales from the
    values), "nvfp4_row" (a scale per row of inputs) or "unquantized" (the norm alone); or one of these or "bf16" per
    product: "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=bf16". "bf16" for all three swaps nothing
    """

    recipes: Table = field(default_factory=dict)
    """
    Recipes for linears and experts in modules named as in mxnorm.filter_fqns. The last matching name wins;
    mxnorm.filter_fqns and mxnorm.high_precision_share take precedence. In the TOML: the table [mxnorm.recipes] with
    lines such as "layers.0" = "bf16"
    """

    estimator: Literal[ESTIMATORS] = "pre_round"
    """
    Source of the RMS: "pre_round" (block maxima, the method), "post_round" (block scales, an ablation) or "exact" (the
    true RMS, a control)
    """

    gated_estimate_ratio: FinitePositive | None = None
    """Behind gates (Mamba-2): divide estimates by this, their measured ratio to the RMS. Unset: exact RMS"""

    scale_rounding: Literal[SCALE_ROUNDINGS] | None = None
    """
    MX: block scales rounded by "rceil" (up, the default), "rceil_0_18" (torchao 0.18's) or "floor" (OCP,
    saturates)
    """

    tensor_scale: Literal[TENSOR_SCALES] | None = None
    """
    NVFP4: the tensor scale of a norm's output is "static" (from MXNorm's bound) or "dynamic" (from the largest
    element); "row": each row of inputs has one. Unset: the recipe's
    """

    weight_tiles: bool | None = None
    """Square tiles of a weight share a scale, so fprop and dgrad use the same codes. Unset: the recipe's"""

    hadamard: bool | None = None
    """NVFP4, MXFP4: Hadamard transform of wgrad's operands along the tokens. Unset: true"""

    stochastic_rounding: bool | None = None
    """
    NVFP4: output gradients are rounded stochastically, with bits from debug.seed, layer, step and rank. Unset: true
    """

    four_over_six: Literal[FOUR_OVER_SIX] | None = None
    """NVFP4: a block's maximum becomes 4 where that loses less, in "weights", "activations" or "both". Unset: false"""

    four_over_six_error: Literal[FOUR_OVER_SIX_ERRORS] | None = None
    """Which loss four_over_six compares: errors' magnitudes ("mae", the default) or squares ("mse")"""

    backward: Literal[BACKWARDS] | None = None
    """Operands of dgrad and wgrad: "quantized" or "dequantized" (values of fprop's codes; dY stays as it is)"""

    high_precision_share: ShareBelowOne | None = None
    """Share of the blocks, counted from the last, that stay in high precision. Unset: 0.15 for NVFP4, else 0"""

    high_precision_last: NotNegative | None = None
    """Number of these blocks, instead of a share. Nemotron 3: Super 14, Ultra 16; Megatron Bridge: Llama 3 8B 4"""

    mode: Annotated[Literal["auto", "native", "emulated", "reference"], Resume.FREE] = "auto"
    """
    Products are "native" (MX tensor cores), "emulated" (exact bf16 images, any GPU), "reference" (fp32 in plain
    PyTorch, any device) or "auto" (the first that the hardware supports)
    """

    gather: Free[Literal["auto", "high_precision", "quantized"]] = "auto"
    """
    Tensor parallelism: a norm sends "high_precision" (its input), "quantized" (codes and scales; training.seq_len of a
    process is a multiple of 32) or "auto" (fewer bytes)
    """

    dispatch: Free[Literal["auto", "high_precision", "quantized"]] = "auto"
    """
    Expert parallelism: an MXNorm sends experts "high_precision" (values), "quantized" (MXFP8 codes, half the bytes, the
    same results) or "auto" (codes where fprop is MXFP8)
    """

    graph_passes: Free[bool] = True
    """
    torch.compile fuses SwiGLU with its casts and residual adds with MXNorm; a rotation is one kernel. Last bits of fp32
    results may differ before rounding
    """

    eps: Amount | None = None
    """Added to the squared RMS. Unset: the replaced norm's"""
    cache_weights: Free[bool] = True
    """With gradient accumulation or a pipeline: cast every weight once per step"""

    group_linears: Free[bool] = True
    """Multiply the linears that share a norm together. Changes only the order of sums"""

    schedule: Schedule = field(default_factory=list)
    """
    Other recipes for some steps: entries [[mxnorm.schedule]] with from_step or from_share (0.9: after 90 % of
    training.steps), until_step or until_share (else to the end), modules (else all swapped layers), and recipe or
    norm = "rmsnorm"
    """

    filter_fqns: Names = None
    """
    Modules that stay in high precision. A name is whole segments of an FQN, literal or glob: "layers.*.attention.wo".
    Every name must match. Unset: the output head; an empty list: nothing
    """

    diagnostics: Diagnostics = field(default_factory=Diagnostics)


@dataclass
class FusedNorm:
    resume = Resume.FREE

    when_compiled: Literal["auto", "kernel", "formula"] = "auto"
    """
    In compiled layers: "kernel" (mxtrain's), "formula" (PyTorch's, which the compiler may fuse) or "auto" (the faster
    one in our measurements)
    """

    filter_fqns: Names = field(default_factory=list)
    """Norms, or modules with norms, that stay PyTorch's"""


@dataclass
class DecomposeKRouter:
    resume = Resume.REFUSED

    filter_fqns: Names = field(default_factory=list)
    """Gates, or modules with gates, that stay PyTorch's"""


@dataclass
class ModelArgs:
    """The model's own sizes, on top of ``model.flavor``. Unset keeps the flavor's.

    ``mxtrain.settings.model_settings`` lists which of them each model has. The vocabulary is ``data.vocab_size``.
    """

    resume = Resume.REFUSED

    dim: Positive | None = None
    """Features of the residual stream"""
    n_layers: Positive | None = None
    """Number of transformer blocks"""
    n_heads: Positive | None = None
    """Number of query heads"""
    n_kv_heads: Positive | None = None
    """Key and value heads; divides n_heads"""
    head_dim: Positive | None = None
    """Features of a head; llama3 and llama4 have dim / n_heads"""
    hidden_dim: Positive | None = None
    """Hidden features of a dense feed-forward. Unset, llama3 computes it from dim"""
    multiple_of: Positive | None = None
    """Hidden features are rounded up to a multiple of this"""
    ffn_dim_multiplier: FinitePositive | None = None
    """Factor of the hidden features, which are 8/3 of dim without it"""
    enable_weight_tying: bool | None = None
    """The output head has the embedding's weight"""
    norm_eps: Amount | None = None
    """Added to the mean square in RMSNorms, but for the last one of deepseek_v3"""
    max_seq_len: Free[Positive | None] = None
    """Positions that an export names. Unset: training.seq_len, the least"""

    rope_theta: FinitePositive | None = None
    """Base of the rotary frequencies"""
    rope_factor: FinitePositive | None = None
    """Long rotary waves become so many times longer; 1 is no scaling"""
    rope_low_freq_factor: FinitePositive | None = None
    """Waves longer than rope_original_seq_len / this are scaled in full"""
    rope_high_freq_factor: FinitePositive | None = None
    """Waves shorter than rope_original_seq_len / this are not scaled"""
    rope_original_seq_len: Positive | None = None
    """Positions before the scaling"""
    num_experts: Positive | None = None
    """Routed experts of a layer"""
    num_shared_experts: NotNegative | None = None
    """Experts that every token uses"""
    top_k: Positive | None = None
    """Routed experts that a token uses"""
    load_balance_coeff: Amount | None = None
    """Step of the bias that balances experts; 0: no bias"""
    moe_inter_dim: Positive | None = None
    """Hidden features of an expert"""
    n_dense_layers: NotNegative | None = None
    """First layers without experts"""
    interleave_moe_layer_step: Positive | None = None
    """Every so many layers, one has experts"""
    q_lora_rank: NotNegative | None = None
    """Rank of the queries' projection; 0 is full rank"""
    kv_lora_rank: Positive | None = None
    """Rank of the projection of keys and values"""
    qk_nope_head_dim: Positive | None = None
    """Features of query and key heads without rotation"""
    qk_rope_head_dim: Positive | None = None
    """Features of query and key heads with rotation"""
    v_head_dim: Positive | None = None
    """Features of a value's head"""


@dataclass
class Data:
    resume = Resume.DATA

    installed: bool = False
    """
    "python": also read the source of every installed package, each up to 20 % of the text
    """

    vocab_size: Refused[VocabularySize] = 0
    """Vocabulary of the model and of a tokenizer that is built; 0: the flavor's"""
    unseparated: Free[bool] = False
    """Take a tokenizer with neither bos nor eos token: nothing separates documents"""
    max_bytes: NotNegative = 0
    """Stop collecting text after so many bytes; 0 collects all. Another training.dataset in a flag drops the limit"""

    validation_share: ShareBelowOne = 0.01
    """
    Share of the documents held out for validation, in [0, 1), by a hash of the path ("python") or the text ("files",
    "hf")
    """

    seed: NotNegative = 0
    """Seed of the order of the documents"""
    text_key: str = "text"
    """Column or key of the text in JSONL, CSV, Parquet, Arrow and Hugging Face datasets, or of token ids"""
    hf_config: str | None = None
    """
    "hf": configuration of the dataset, such as "en" for allenai/c4
    """

    cache_dir: Free[LocalPath] = ""
    """Folder of tokenizers and prepared texts. Empty: $MXTRAIN_CACHE, else ~/.cache/mxtrain"""
    prepared: Free[LocalPath] = ""
    """Train on this prepared text, by name (a folder of data.cache_dir) or path, without reading its source"""


@dataclass
class Model:
    resume = Resume.FREE

    hf_assets_path: LocalPath = ""
    """Folder with a Hugging Face tokenizer. Empty: a byte-level BPE tokenizer is built from the training text"""


@dataclass
class Validation:
    resume = Resume.FREE

    dataset: str = ""
    """Validation text: "python", "files" or "hf". Empty: held-out documents of the training text"""


@dataclass
class Metrics:
    resume = Resume.FREE

    on_nonfinite_loss: Literal["stop", "continue"] = "stop"
    """
    If a loss or, at a checkpoint and the end, a weight or optimizer state is not finite: "stop" (exit status 1) or
    "continue" (warn). It is never saved
    """

    wandb_project: str = ""
    """Project on wandb. Empty: $WANDB_PROJECT, else mxtrain"""
    wandb_name: str = ""
    """Name of the run on wandb. Empty: $WANDB_RUN_NAME, else model, flavor, converter, recipe and p"""
    wandb_group: str = ""
    """Group of the run on wandb. Empty: $WANDB_RUN_GROUP"""
    wandb_tags: Names = None
    """Tags of the run on wandb. Unset: $WANDB_TAGS"""


@dataclass
class Checkpoint:
    resume = Resume.FREE

    last_save_model_only: bool = False
    """Save only the weights after the last step; no run resumes from them"""
    verify: bool = False
    """Keep a hash of every file, and compare hashes before a load, not only sizes"""
    may_change: Names = field(default_factory=list)
    """
    Full names of settings, such as "mxnorm.p", that a resumed run may change although it becomes another experiment
    """


@dataclass
class JobConfig:
    mxnorm: MXNorm = field(default_factory=MXNorm)
    fused_norm: FusedNorm = field(default_factory=FusedNorm)
    decompose_k_router: DecomposeKRouter = field(default_factory=DecomposeKRouter)
    model_args: ModelArgs = field(default_factory=ModelArgs)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
