"""mxtrain's TOML sections, and its fields in TorchTitan's sections.

``resume`` of a class says what a resumed run does with its fields. The type of a field may state another rule.

With ``job.custom_config_module = "mxtrain.titan.job_config"`` TorchTitan merges ``JobConfig`` into its own job config,
and shows the docstring under each field in ``--help``. This file must not postpone annotations: TorchTitan's merge of
nested tables cannot read field types that are strings.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mxtrain.checkpoints.run_folder import MERGE_LIMIT
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

    every: NotNegative | None = None
    """
    Number of steps from one measurement of norms, casts, GEMMs and routers to the next; 0: no measurement. Unset: 200
    in mode "fp8_merged", otherwise 0
    """

    fqns: Names = None
    """Modules to measure, named as in mxnorm.filter_fqns. Unset: all swapped modules, and routers of swapped experts"""

    tokens: Groups = 512
    """Number of tokens that each process measures, spread over its first sequences; a multiple of 32"""


@dataclass
class MXNorm:
    resume = Resume.REFUSED

    p: Literal[P_VALUES] = 2
    """Exponent of the p-mean, which estimates the RMS from block maxima: 1 or 2"""
    recipe: str = "mxfp8"
    """
    One recipe for all three GEMMs: "mxfp8", "mxfp8_2d", "mxfp4", "nvfp4", "nvfp4_dynamic", "nvfp4_row",
    "nvfp4_4over6", "nvfp4_rl" (explained in CHOOSING.md), "unquantized" (MXNorm without casts) or "bf16" (swaps
    nothing). Or a recipe for each GEMM, such as "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=bf16"
    """

    recipes: Table = field(default_factory=dict)
    """
    Recipes of single linears and experts, named as in mxnorm.filter_fqns. The last matching name wins.
    mxnorm.filter_fqns and mxnorm.high_precision_share take precedence. TOML: "layers.0" = "bf16" in [mxnorm.recipes]
    """

    estimator: Literal[ESTIMATORS] = "pre_round"
    """
    Source of the RMS: "pre_round" (block maxima), "post_round" (block scales, for comparison) or "exact" (the true RMS)
    """

    gated_estimate_ratio: FinitePositive | None = None
    """
    Gated norms (Mamba-2) divide the estimate by this ratio of estimate to RMS: with p = 2 and Gaussian
    gates, 1.66 (blocks of 16: 1.49). Unset: they take the exact RMS
    """

    scale_rounding: Literal[SCALE_ROUNDINGS] | None = None
    """
    MXFP8 and MXFP4: rounding of block scales, "rceil" (up), "rceil_0_18" (as torchao 0.18) or "floor" (the OCP
    rule, which saturates). Unset: "rceil"
    """

    tensor_scale: Literal[TENSOR_SCALES] | None = None
    """
    NVFP4: source of the tensor scale of a norm's output, "static" (MXNorm's bound), "dynamic" (the largest element) or
    "row" (the largest element of each row). Unset: as in the recipe
    """

    weight_tiles: bool | None = None
    """Cast weights with one scale per square tile: fprop and dgrad share codes. Unset: as in the recipe"""

    hadamard: bool | None = None
    """NVFP4 and MXFP4: Hadamard-transform both operands of wgrad along the tokens. Unset: true"""

    stochastic_rounding: bool | None = None
    """NVFP4: round output gradients stochastically; debug.seed, layer, step and rank give random bits. Unset: true"""

    four_over_six: Literal[FOUR_OVER_SIX] | None = None
    """
    NVFP4: the largest element of a block becomes 4 instead of 6 if the error of the block gets smaller, in "weights",
    "activations" or "both". Unset: as in the recipe
    """

    four_over_six_error: Literal[FOUR_OVER_SIX_ERRORS] | None = None
    """Error that four_over_six compares: sum of absolute errors ("mae", the default) or of squared errors ("mse")"""

    backward: Literal[BACKWARDS] | None = None
    """
    Operands of dgrad and wgrad: "quantized" (new casts) or "dequantized" (images from fprop; output gradients are not
    cast). Unset: as in the recipe
    """

    high_precision_share: ShareBelowOne | None = None
    """Share of transformer blocks that stay in high precision, from the last. Unset: 0.15 for NVFP4, otherwise 0"""

    high_precision_last: NotNegative | None = None
    """
    Number of transformer blocks that stay in high precision, from the last, instead of a share. Published: 14 (Nemotron
    3 Super), 16 (Nemotron 3 Ultra), 4 (Megatron Bridge, Llama 3 8B)
    """

    mode: Annotated[Literal["auto", "native", "emulated", "reference", "fp8_merged"], Resume.FREE] = "auto"
    """
    How GEMMs are computed: "native" (MX tensor cores), "emulated" (bf16 tensor cores of any GPU), "reference" (fp32 in
    plain PyTorch, any device) or "auto" (the first of these that the hardware supports). "fp8_merged", for MXFP8 only:
    FP8 tensor cores (Hopper); blocks of 32 share scales by 128, and their codes are rounded once more
    """

    merge_limit: Free[ShareBelowOne] = MERGE_LIMIT
    """
    For mode "fp8_merged": share of a cast's elements that the second rounding may change. Where diagnostics
    (mxnorm.diagnostics) measure more, the layer multiplies images ("emulated") for the rest of the run
    """

    gather: Free[Literal["auto", "high_precision", "quantized"]] = "auto"
    """
    What a norm sends under tensor parallelism: "high_precision" (its input), "quantized" (codes and scales; each
    process needs a multiple of 32 tokens of each sequence) or "auto" (fewer bytes)
    """

    dispatch: Free[Literal["auto", "high_precision", "quantized"]] = "auto"
    """
    What an MXNorm sends to experts under expert parallelism: "high_precision" (values), "quantized" (MXFP8 codes: half
    the bytes, the same results) or "auto" ("quantized" if fprop is MXFP8)
    """

    fsdp_gather: Free[Literal["auto", "high_precision", "quantized"]] = "auto"
    """
    What FSDP gathers of weights in tiles (recipe "mxfp8_2d"): "high_precision" (weights in bf16 or fp32), "quantized"
    (codes) or "auto" (now "high_precision")
    """

    graph_passes: Free[bool] = True
    """
    Under torch.compile, fuse SwiGLU with its casts, residual additions with MXNorm, and each rotary embedding into one
    kernel. The last bits of fp32 results may change
    """

    eps: Amount | None = None
    """Added to the squared RMS. Unset: eps of the replaced norm"""
    cache_weights: Free[bool] = True
    """Cast every weight once per step, not once per microbatch (gradient accumulation, pipelines)"""

    group_linears: Free[bool] = True
    """Compute the linears behind one norm in one GEMM. Only the order of sums changes"""

    schedule: Schedule = field(default_factory=list)
    """
    Other recipes for some steps: entries [[mxnorm.schedule]] with from_step or from_share (0.9: after 90 % of
    training.steps), until_step or until_share (unset: to the end), modules (unset: all swapped modules), recipe or
    norm = "rmsnorm"
    """

    filter_fqns: Names = None
    """
    Modules that stay in high precision. A name has one or more whole segments of a module's full name, such as "wo",
    "layers.0" or "layers.*.attention"; every name must match a module. Unset: the output head; []: no module
    """

    diagnostics: Diagnostics = field(default_factory=Diagnostics)


@dataclass
class FusedNorm:
    resume = Resume.FREE

    when_compiled: Literal["auto", "kernel", "formula"] = "auto"
    """
    What compiled layers run: "kernel" (mxtrain's), "formula" (PyTorch operations, which the compiler may fuse) or
    "auto" (the faster in our measurements)
    """

    filter_fqns: Names = field(default_factory=list)
    """Norms that stay, or modules whose norms stay"""


@dataclass
class DecomposeKRouter:
    resume = Resume.REFUSED

    filter_fqns: Names = field(default_factory=list)
    """Gates that stay, or modules whose gates stay"""


@dataclass
class ModelArgs:
    """Sizes that replace sizes of ``model.flavor``. An unset size keeps the value of the flavor.

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
    """Hidden features of a dense feed-forward. Unset: llama3 computes their number from dim"""
    multiple_of: Positive | None = None
    """Round the number of hidden features up to a multiple of this number"""
    ffn_dim_multiplier: FinitePositive | None = None
    """Hidden features are this factor times 8/3 of dim"""
    enable_weight_tying: bool | None = None
    """The output head shares the weight of the embedding"""
    norm_eps: Amount | None = None
    """Added to the mean square in every RMSNorm, except in the last norm of deepseek_v3"""
    max_seq_len: Free[Positive | None] = None
    """Number of positions in an exported config, at least training.seq_len. Unset: training.seq_len"""

    rope_theta: FinitePositive | None = None
    """Base of the rotary frequencies"""
    rope_factor: FinitePositive | None = None
    """Factor that stretches long rotary wavelengths; 1 stretches nothing"""
    rope_low_freq_factor: FinitePositive | None = None
    """Wavelengths above rope_original_seq_len / rope_low_freq_factor are stretched by rope_factor"""
    rope_high_freq_factor: FinitePositive | None = None
    """Wavelengths below rope_original_seq_len / rope_high_freq_factor are not stretched"""
    rope_original_seq_len: Positive | None = None
    """Number of positions before stretching"""
    num_experts: Positive | None = None
    """Routed experts of a layer"""
    num_shared_experts: NotNegative | None = None
    """Experts that every token uses"""
    top_k: Positive | None = None
    """Routed experts that a token uses"""
    load_balance_coeff: Amount | None = None
    """Step size of the router bias that balances experts; 0: no bias"""
    moe_inter_dim: Positive | None = None
    """Hidden features of an expert"""
    n_dense_layers: NotNegative | None = None
    """Number of first layers, which have no experts"""
    interleave_moe_layer_step: Positive | None = None
    """Distance from one layer with experts to the next; 1: every layer has experts"""
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
    """For "python": also read the source of installed packages; each package gives at most 20 % of the text"""

    vocab_size: Refused[VocabularySize] = 0
    """Vocabulary size of the model, and of a tokenizer that mxtrain builds. 0: size of the flavor"""
    unseparated: Free[bool] = False
    """Accept a tokenizer with neither bos nor eos token. Nothing then separates documents"""
    max_bytes: NotNegative = 0
    """Maximum bytes of text; 0: no limit. A flag that changes training.dataset removes the file's limit"""

    validation_share: ShareBelowOne = 0.01
    """
    Share of documents, in [0, 1), held out for validation. A hash of the path ("python") or of the text ("files", "hf")
    selects these documents
    """

    seed: NotNegative = 0
    """Seed for the order of documents"""
    text_key: str = "text"
    """Column or key of text or token ids in JSONL, CSV, Parquet, Arrow and Hugging Face datasets"""
    hf_config: str | None = None
    """For "hf": configuration of the dataset, such as "en" for allenai/c4"""

    cache_dir: Free[LocalPath] = ""
    """Folder for tokenizers and prepared texts. Empty: $MXTRAIN_CACHE, else ~/.cache/mxtrain"""
    prepared: Free[LocalPath] = ""
    """Prepared text to read instead of the source: a folder in data.cache_dir, or a path"""


@dataclass
class Model:
    resume = Resume.FREE

    hf_assets_path: LocalPath = ""
    """Folder with a Hugging Face tokenizer. Empty: mxtrain builds a byte-level BPE tokenizer from the training text"""


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
    After a loss that is not finite: "stop" (exit status 1) or "continue" (with a warning). The same holds for weights
    and optimizer states at a checkpoint and at the end; mxtrain saves only finite states
    """

    wandb_project: str = ""
    """Project on wandb. Empty: $WANDB_PROJECT, else mxtrain"""
    wandb_name: str = ""
    """Name of the run on wandb. Empty: $WANDB_RUN_NAME, else model, flavor, sizes, converter, recipe, p and seed"""
    wandb_group: str = ""
    """Group of the run on wandb. Empty: $WANDB_RUN_GROUP"""
    wandb_tags: Names = None
    """Tags of the run on wandb. Unset: $WANDB_TAGS"""


@dataclass
class Checkpoint:
    resume = Resume.FREE

    last_save_model_only: bool = False
    """After the last step, save only weights, from which no run resumes"""
    verify: bool = False
    """Save a hash of every file, and compare hashes before loading, not only sizes"""
    may_change: Names = field(default_factory=list)
    """Full names of settings, such as mxnorm.p, that a resumed run may change although this makes another experiment"""


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
