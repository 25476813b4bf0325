"""mxtrain's TOML sections, and its fields in TorchTitan's sections.

``resume`` of a class says what a resumed run does with its fields. The type of a field may state another rule.

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
    """Measure norms, casts, products and routers in every step that is a multiple of this; 0 measures nothing"""

    fqns: Names = None
    """
    Modules to measure, by names as in mxnorm.filter_fqns. Unset: all swapped norms, linears and experts, and their
    routers
    """

    tokens: Groups = 512
    """Tokens that every process measures, a multiple of 32, spread over the first sequences"""


@dataclass
class MXNorm:
    resume = Resume.REFUSED

    p: Literal[P_VALUES] = 2
    """Exponent of the p-mean, which estimates the RMS from block maxima: 1 or 2"""
    recipe: str = "mxfp8"
    """
    Format of the operands of all three GEMMs: "mxfp8", "mxfp8_2d" (weights in square tiles), "mxfp4", "nvfp4",
    "nvfp4_dynamic" (the tensor scale comes from the values), "nvfp4_row" (one tensor scale per row of inputs),
    "nvfp4_4over6" or "nvfp4_rl"; or "unquantized" (only the norm changes). "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=bf16"
    names a format per GEMM; "bf16" for all three swaps nothing
    """

    recipes: Table = field(default_factory=dict)
    """
    Other recipes for linears and experts, by names as in mxnorm.filter_fqns. The last matching name wins;
    mxnorm.filter_fqns and mxnorm.high_precision_share take precedence. In TOML: a table [mxnorm.recipes] with lines
    such as "layers.0" = "bf16"
    """

    estimator: Literal[ESTIMATORS] = "pre_round"
    """
    Source of the RMS: "pre_round" (block maxima, the method), "post_round" (block scales, an ablation) or "exact" (the
    true RMS, a control)
    """

    gated_estimate_ratio: FinitePositive | None = None
    """Norms behind gates (Mamba-2) divide estimates by this measured ratio of estimate to RMS. Unset: the exact RMS"""

    scale_rounding: Literal[SCALE_ROUNDINGS] | None = None
    """
    MX formats: how block scales are rounded: "rceil" (up), "rceil_0_18" (as torchao 0.18 does) or "floor" (the OCP
    rule, which saturates). Unset: "rceil"
    """

    tensor_scale: Literal[TENSOR_SCALES] | None = None
    """
    NVFP4: source of the tensor scale of a norm's output: "static" (MXNorm's bound), "dynamic" (the largest element) or
    "row" (the largest element of each row of inputs). Unset: the recipe's
    """

    weight_tiles: bool | None = None
    """Weights have one scale per square tile: fprop and dgrad multiply the same codes. Unset: the recipe's"""

    hadamard: bool | None = None
    """NVFP4 and MXFP4: Hadamard-transform both operands of wgrad along the tokens. Unset: true"""

    stochastic_rounding: bool | None = None
    """NVFP4: round output gradients stochastically; debug.seed, layer, step and rank give the bits. Unset: true"""

    four_over_six: Literal[FOUR_OVER_SIX] | None = None
    """
    NVFP4: in "weights", "activations" or "both", the largest element of a block becomes 4 instead of 6 if the block
    then loses less. Unset: the recipe's
    """

    four_over_six_error: Literal[FOUR_OVER_SIX_ERRORS] | None = None
    """Loss that four_over_six compares: the sum of absolute errors ("mae", the default) or of squares ("mse")"""

    backward: Literal[BACKWARDS] | None = None
    """
    Operands of dgrad and wgrad: "quantized" (cast anew) or "dequantized" (values of the codes of fprop; output
    gradients are not rounded). Unset: the recipe's
    """

    high_precision_share: ShareBelowOne | None = None
    """Share of the blocks, counted from the last, that stay in high precision. Unset: 0.15 for NVFP4, otherwise 0"""

    high_precision_last: NotNegative | None = None
    """
    Number of blocks that stay in high precision, instead of a share. Published: Nemotron 3 Super 14, Nemotron 3 Ultra
    16; Megatron Bridge 4 for Llama 3 8B
    """

    mode: Annotated[Literal["auto", "native", "emulated", "reference"], Resume.FREE] = "auto"
    """
    How products are computed: "native" (MX tensor cores), "emulated" (bf16 tensor cores multiply the rounded operands,
    any GPU), "reference" (fp32 in plain PyTorch, any device) or "auto" (the first of these that the hardware supports)
    """

    gather: Free[Literal["auto", "high_precision", "quantized"]] = "auto"
    """
    Tensor parallelism: what a norm sends: "high_precision" (its input), "quantized" (codes and scales; every process
    needs a multiple of 32 tokens of each sequence) or "auto" (whichever has fewer bytes)
    """

    dispatch: Free[Literal["auto", "high_precision", "quantized"]] = "auto"
    """
    Expert parallelism: what an MXNorm sends to experts: "high_precision" (values), "quantized" (MXFP8 codes: half the
    bytes, the same results) or "auto" (codes if fprop is MXFP8)
    """

    graph_passes: Free[bool] = True
    """
    Under torch.compile, fuse SwiGLU with its casts and residual additions with MXNorm; make each rotation one kernel.
    Last bits of fp32 results may differ before rounding
    """

    eps: Amount | None = None
    """Added to the squared RMS. Unset: the replaced norm's eps"""
    cache_weights: Free[bool] = True
    """Cast every weight once per step if a step has several microbatches (gradient accumulation, pipeline)"""

    group_linears: Free[bool] = True
    """Multiply the linears that share a norm in one GEMM. Only the order of sums changes"""

    schedule: Schedule = field(default_factory=list)
    """
    Other recipes for some steps: entries [[mxnorm.schedule]] with from_step or from_share (0.9: after 90 % of
    training.steps), until_step or until_share (unset: to the end), modules (unset: all swapped layers), and recipe or
    norm = "rmsnorm"
    """

    filter_fqns: Names = None
    """
    Modules that stay in high precision. A name consists of whole segments of an FQN, literal or with wildcards, such as
    "layers.*.attention.wo"; every name must match. Unset: the output head; an empty list: no module
    """

    diagnostics: Diagnostics = field(default_factory=Diagnostics)


@dataclass
class FusedNorm:
    resume = Resume.FREE

    when_compiled: Literal["auto", "kernel", "formula"] = "auto"
    """
    What runs in compiled layers: "kernel" (mxtrain's), "formula" (PyTorch's, which the compiler may fuse) or "auto"
    (the faster of both in our measurements)
    """

    filter_fqns: Names = field(default_factory=list)
    """Norms that are not swapped, or modules whose norms are not swapped"""


@dataclass
class DecomposeKRouter:
    resume = Resume.REFUSED

    filter_fqns: Names = field(default_factory=list)
    """Gates that are not swapped, or modules whose gates are not swapped"""


@dataclass
class ModelArgs:
    """Sizes that replace those of ``model.flavor``. An unset size keeps the value of the flavor.

    ``mxtrain.settings.model_settings`` lists the sizes of each model. The vocabulary is ``data.vocab_size``.
    """

    resume = Resume.REFUSED

    dim: Positive | None = None
    """Features of the residual stream"""
    n_layers: Positive | None = None
    """Number of transformer blocks"""
    n_heads: Positive | None = None
    """Number of query heads"""
    n_kv_heads: Positive | None = None
    """Number of key and value heads; divides n_heads"""
    head_dim: Positive | None = None
    """Features of a head; llama3 and llama4 have dim / n_heads"""
    hidden_dim: Positive | None = None
    """Hidden features of a dense feed-forward. Unset: llama3 computes them from dim"""
    multiple_of: Positive | None = None
    """Hidden features are rounded up to a multiple of this"""
    ffn_dim_multiplier: FinitePositive | None = None
    """Factor of the hidden features. Unset: they are 8/3 of dim"""
    enable_weight_tying: bool | None = None
    """The output head shares the weight of the embedding"""
    norm_eps: Amount | None = None
    """Added to the mean square in every RMSNorm, except in the last norm of deepseek_v3"""
    max_seq_len: Free[Positive | None] = None
    """Number of positions that an export names, at least training.seq_len. Unset: training.seq_len"""

    rope_theta: FinitePositive | None = None
    """Base of the rotary frequencies"""
    rope_factor: FinitePositive | None = None
    """Factor that stretches long rotary wavelengths; 1 stretches nothing"""
    rope_low_freq_factor: FinitePositive | None = None
    """Wavelengths longer than rope_original_seq_len / this are stretched by the whole factor"""
    rope_high_freq_factor: FinitePositive | None = None
    """Wavelengths shorter than rope_original_seq_len / this are not stretched"""
    rope_original_seq_len: Positive | None = None
    """Number of positions before the stretching"""
    num_experts: Positive | None = None
    """Routed experts of a layer"""
    num_shared_experts: NotNegative | None = None
    """Experts that every token uses"""
    top_k: Positive | None = None
    """Routed experts that a token uses"""
    load_balance_coeff: Amount | None = None
    """Step by which the bias that balances the experts changes; 0: no bias"""
    moe_inter_dim: Positive | None = None
    """Hidden features of an expert"""
    n_dense_layers: NotNegative | None = None
    """Number of layers without experts, at the beginning"""
    interleave_moe_layer_step: Positive | None = None
    """Every n-th layer has experts; this is n"""
    q_lora_rank: NotNegative | None = None
    """Rank of the query projection; 0 is full rank"""
    kv_lora_rank: Positive | None = None
    """Rank of the key and value projection"""
    qk_nope_head_dim: Positive | None = None
    """Features of a query or key head without rotation"""
    qk_rope_head_dim: Positive | None = None
    """Features of a query or key head with rotation"""
    v_head_dim: Positive | None = None
    """Features of a value head"""


@dataclass
class Data:
    resume = Resume.DATA

    installed: bool = False
    """For "python": also read the source of installed packages; no package gives more than 20 % of the text"""

    vocab_size: Refused[VocabularySize] = 0
    """Vocabulary size of the model, and of a tokenizer that is built. 0: the flavor's"""
    unseparated: Free[bool] = False
    """Accept a tokenizer that has neither a bos nor an eos token: nothing then separates documents"""
    max_bytes: NotNegative = 0
    """Collect at most so many bytes of text; 0: no limit. A flag with another training.dataset removes the limit"""

    validation_share: ShareBelowOne = 0.01
    """
    Share, in [0, 1), of the documents that is held out for validation. A hash of the path ("python") or of the text
    ("files", "hf") selects the documents
    """

    seed: NotNegative = 0
    """Seed of the order of the documents"""
    text_key: str = "text"
    """Column or key of the text or token ids, in JSONL, CSV, Parquet, Arrow and Hugging Face datasets"""
    hf_config: str | None = None
    """For "hf": configuration of the dataset, such as "en" for allenai/c4"""

    cache_dir: Free[LocalPath] = ""
    """Folder for tokenizers and prepared texts. Empty: $MXTRAIN_CACHE, else ~/.cache/mxtrain"""
    prepared: Free[LocalPath] = ""
    """Name (a folder in data.cache_dir) or path of a prepared text; the source is then not read"""


@dataclass
class Model:
    resume = Resume.FREE

    hf_assets_path: LocalPath = ""
    """Folder with a Hugging Face tokenizer. Empty: a byte-level BPE tokenizer is built from the training text"""


@dataclass
class Validation:
    resume = Resume.FREE

    dataset: str = ""
    """Validation text: "python", "files" or "hf". Empty: documents of the training text that were held out"""


@dataclass
class Metrics:
    resume = Resume.FREE

    on_nonfinite_loss: Literal["stop", "continue"] = "stop"
    """
    If a loss is not finite, or at a checkpoint or the end a weight or optimizer state: "stop" (exit status 1) or
    "continue" (with a warning). Such a state is never saved
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
    """Full names of settings (mxnorm.p) that a resumed run may change although they make another experiment"""


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
