"""mxtrain's TOML sections, and its fields in TorchTitan's sections.

The sections are ``[mxnorm]``, ``[fused_norm]``, ``[fused_rmsnorm]``, ``[decompose_k_router]``, ``[model_args]`` and
``[data]``.

``resume`` and ``label`` of a class say what a resumed run and a plot do with its fields. The type of a field says it
for this one where that is something else.

With ``job.custom_config_module = "mxtrain.titan.job_config"`` TorchTitan merges ``JobConfig`` into its own job config,
and shows the docstring under each field in ``--help``. This file must not postpone annotations: TorchTitan's merge of
nested tables cannot read field types that are strings.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mxtrain.recipes.formats import P_VALUES, SCALE_ROUNDINGS
from mxtrain.recipes.recipe import ESTIMATORS, TENSOR_SCALES
from mxtrain.recipes.schedule import RMSNORM
from mxtrain.settings.types import (
    Amount,
    AtLeastTwo,
    FinitePositive,
    Free,
    Groups,
    Label,
    LocalPath,
    Names,
    NotNegative,
    Positive,
    Refused,
    Resume,
    Schedule,
    ShareAboveZero,
    ShareBelowOne,
    Table,
    VocabularySize,
)


@dataclass
class Diagnostics:
    resume = Resume.FREE

    every: NotNegative = 0
    """
    Measure norms, casts, matrix products and routers in every step whose number is a multiple of this, and log the
    figures; 0 is off. The next two settings say what is measured, and need this one
    """

    fqns: Names = None
    """
    Comma-separated names of modules to measure, written as in mxnorm.filter_fqns. Every name must match a norm, linear
    or experts that are swapped, or the router of such experts. Unset measures all of them
    """

    tokens: Groups = 512
    """Number of tokens per process that are measured, a positive multiple of 32, spread over the first sequences"""


@dataclass
class Guard:
    resume = Resume.REFUSED

    recipe: str | None = None
    """
    Switches the guard on: recipe of all swapped layers for some steps after a spike of the loss, as in
    mxnorm.schedule: "bf16", or a recipe for some GEMMs, such as "fprop=bf16". Unset, and without p, estimator and norm,
    there is no guard
    """

    p: Literal[P_VALUES] | None = None
    """p of all norms after a spike"""
    estimator: Literal[ESTIMATORS] | None = None
    """Estimator of all norms after a spike: "exact", for example"""
    norm: Literal[RMSNORM] | None = None
    """After a spike, "rmsnorm": norms and the linears that they feed are in high precision"""
    window: AtLeastTwo = 100
    """Number of losses, one a step, whose mean and standard deviation a loss is compared with"""
    sigmas: FinitePositive = 6.0
    """A loss is a spike if it is more than so many standard deviations above the mean"""
    steps: Positive = 100
    """Number of steps with the other recipe"""


@dataclass
class MXNorm:
    resume = Resume.REFUSED

    p: Literal[P_VALUES] = 2
    """Exponent of the p-mean over block maxima that estimates the RMS: 1 or 2"""
    recipe: str = "mxfp8"
    """
    Format of the operands of all swapped linears and experts: "mxfp8", "nvfp4", "nvfp4_dynamic" (every scale is
    computed from its values), or "unquantized" (isolates the norm). Or one of these or "bf16" per matrix product, for
    example "fprop=nvfp4, dgrad=mxfp8, wgrad=bf16". Layers with "bf16" for all three are not swapped, nor in mode
    "native" experts with NVFP4 for any of them
    """

    recipes: Table = field(default_factory=dict)
    """
    Recipes for the linears and experts in the named modules, instead of mxnorm.recipe. Names are written as in
    mxnorm.filter_fqns. mxnorm.filter_fqns and mxnorm.high_precision_share take precedence. If several names match a
    layer, the last one wins. A norm has the recipe of the linears it feeds. In the TOML: the table [mxnorm.recipes]
    with lines such as "layers.0" = "bf16"
    """

    estimator: Literal[ESTIMATORS] = "pre_round"
    """
    Where the norm's RMS comes from: "pre_round" (block maxima, the method), "post_round" (block scales
    after rounding, an ablation) or "exact" (the true RMS, a control)
    """

    scale_rounding: Literal[SCALE_ROUNDINGS] | None = None
    """
    How a block's scale is rounded to a power of two: "rceil" (up, the default) or "floor" (OCP, saturates). Not for
    NVFP4
    """

    tensor_scale: Literal[TENSOR_SCALES] | None = None
    """
    NVFP4: source of the per-tensor scale of a norm's output: "static" (known before training, from MXNorm's bound) or
    "dynamic" (the largest element). Unset keeps the recipe's choice. All other operands have dynamic scales
    """

    weight_tiles: bool | None = None
    """
    NVFP4: 16 x 16 tiles of a weight share a scale, so fprop and dgrad use the same codes. Unset keeps the recipe's
    choice: true
    """

    hadamard: bool | None = None
    """
    NVFP4: apply a random Hadamard transform along the tokens to both operands of wgrad. Unset keeps the recipe's
    choice: true
    """

    stochastic_rounding: bool | None = None
    """
    NVFP4: round output gradients stochastically, with random bits from debug.seed (0 if unset), layer, step and rank.
    Unset keeps the recipe's choice: true
    """

    high_precision_share: ShareBelowOne | None = None
    """
    Share of the model's blocks, counted from the last, that stay in high precision, in addition to filter_fqns. Unset
    keeps the recipe's choice: 0.15 for NVFP4, 0 for the others
    """

    mode: Annotated[Literal["auto", "native", "emulated", "reference"], Resume.FREE, Label(variant=True)] = "auto"
    """
    How matrix products run: "native" (MX tensor cores), "emulated" (exact bf16 images of the operands, any GPU),
    "reference" (plain PyTorch in float32, any device), or "auto" (the first of these that the hardware supports)
    """

    gather: Free[Literal["auto", "high_precision", "quantized"]] = "auto"
    """
    Tensor parallelism: what is sent between a norm and its linears: "high_precision" (the norm's input), "quantized"
    (codes and scales; training.seq_len of a process is a multiple of 32), or "auto" (what takes fewer bytes)
    """

    dispatch: Free[Literal["auto", "high_precision", "quantized"]] = "auto"
    """
    Expert parallelism: what is sent from an MXNorm to experts on other processes: "high_precision" (values),
    "quantized" (MXFP8 codes and scales, half the bytes), or "auto" (codes wherever fprop's recipe is MXFP8). Results
    have the same bits
    """

    combine_backward: Literal["high_precision", "quantized"] = "high_precision"
    """
    Expert parallelism: how gradients of the experts' results are sent to the experts: "high_precision", or "quantized"
    (MXFP8 codes and scales by dgrad's recipe, half the bytes; wgrad of w2 then casts rounded gradients)
    """

    graph_passes: Free[bool] = True
    """
    Let torch.compile fuse casts with the operations before them: SwiGLU with its MXFP8 casts, the residual add with the
    MXNorm after it. Rotations of queries and keys are one kernel, too. Before they are rounded, the fp32 results of
    SwiGLU and of rotations may differ in their last bits
    """

    eps: Amount | None = None
    """Added to the squared RMS estimate. Unset keeps the eps of each replaced norm"""
    cache_weights: Free[bool] = True
    """
    With gradient accumulation or a pipeline: cast every weight once per step, not once per microbatch. Results have the
    same bits. Takes 4 bytes per weight element while a step runs (mode emulated). Weights that FSDP or tensor
    parallelism split are cast every time, and so are all weights with optimizer.early_step_in_backward
    """

    group_linears: Free[bool] = True
    """
    Multiply the linears that share a norm (wq, wk, wv; w1, w3) together: one product for their outputs, one for input
    gradients, one for weight gradients, where their recipes agree. Changes only the order of sums
    """

    schedule: Schedule = field(default_factory=list)
    """
    Other recipes for some steps, in the TOML as [[mxnorm.schedule]]. An entry has from_step (the first step) or
    from_share (0.9 begins after 90 % of training.steps); until_step (the last step) or until_share, else it lasts to
    the end; modules, names as in mxnorm.filter_fqns, else all swapped layers; and what changes: recipe (some GEMMs,
    "fprop=bf16", or all), p, estimator, or norm = "rmsnorm" for norms and the linears they feed in high precision
    """

    guard: Guard = field(default_factory=Guard)

    filter_fqns: Names = None
    """
    Comma-separated names of modules that stay in high precision. A name is one or more whole segments of a module's
    FQN, each a literal or a glob: "output", "layers.0", "layers.*.attention.wo". Every name must match a module. Unset
    keeps the model's output head; an empty list keeps nothing
    """

    diagnostics: Diagnostics = field(default_factory=Diagnostics)


@dataclass
class FusedNorm:
    resume, label = Resume.FREE, Label(variant=True)

    when_compiled: Literal["auto", "kernel", "formula"] = "auto"
    """
    Implementation in layers compiled by torch.compile: "kernel" (mxtrain's), "formula" (PyTorch's, which the compiler
    may fuse with its neighbors), or "auto" (the faster one in our measurements)
    """

    filter_fqns: Names = field(default_factory=list)
    """Comma-separated names of norms, or of modules with norms, that stay PyTorch's; see mxnorm.filter_fqns"""


@dataclass
class DecomposeKRouter:
    resume = Resume.REFUSED

    filter_fqns: Names = field(default_factory=list)
    """Comma-separated names of gates, or of modules with gates, that stay PyTorch's; see mxnorm.filter_fqns"""


@dataclass
class ModelArgs:
    """The model's own sizes, on top of ``model.flavor``. Unset keeps the flavor's.

    ``mxtrain.settings.model_settings`` lists which of them each model has. The vocabulary is ``data.vocab_size``.
    """

    resume, label = Resume.REFUSED, Label()

    dim: Positive | None = None
    """Features of the residual stream"""
    n_layers: Positive | None = None
    """Number of transformer blocks"""
    n_heads: Positive | None = None
    """Number of query heads"""
    n_kv_heads: Positive | None = None
    """Number of key and value heads; divides n_heads"""
    head_dim: Positive | None = None
    """Features of a head; the other models have dim / n_heads, deepseek_v3 the qk_ and v_ sizes"""
    hidden_dim: Positive | None = None
    """Hidden features of a dense feed-forward, exactly. Unset, llama3 computes it from dim"""
    multiple_of: Positive | None = None
    """The hidden features of the feed-forward are rounded up to a multiple of this"""
    ffn_dim_multiplier: FinitePositive | None = None
    """Factor of the feed-forward's hidden features, which are 8/3 of dim without it"""
    enable_weight_tying: bool | None = None
    """The output head has the weight of the embedding"""
    norm_eps: Amount | None = None
    """Added to the mean square in an RMSNorm. In deepseek_v3, TorchTitan leaves the last norm's at PyTorch's default"""
    max_seq_len: Free[Positive | None] = None
    """
    The number of positions that config.json names after an export, at least training.seq_len, which is the number in
    training. Unset is training.seq_len
    """

    rope_theta: FinitePositive | None = None
    """Base of the rotary frequencies"""
    rope_factor: FinitePositive | None = None
    """Scaling of the rotary frequencies: long waves become so many times longer. llama3: 1 is no scaling"""
    rope_low_freq_factor: FinitePositive | None = None
    """Waves longer than rope_original_seq_len divided by this are scaled in full"""
    rope_high_freq_factor: FinitePositive | None = None
    """Waves shorter than rope_original_seq_len divided by this are not scaled"""
    rope_original_seq_len: Positive | None = None
    """Number of positions before the scaling of the rotary frequencies"""
    num_experts: Positive | None = None
    """Number of routed experts in a layer with experts"""
    num_shared_experts: NotNegative | None = None
    """Number of experts that every token uses"""
    top_k: Positive | None = None
    """Number of routed experts that a token uses"""
    load_balance_coeff: Amount | None = None
    """Step of the bias that balances the load of experts; 0 for no bias, as transformers' Qwen3 has none"""
    moe_inter_dim: Positive | None = None
    """Hidden features of an expert"""
    n_dense_layers: NotNegative | None = None
    """Number of first layers without experts"""
    interleave_moe_layer_step: Positive | None = None
    """Every so many layers, one has experts"""
    q_lora_rank: NotNegative | None = None
    """Rank of the queries' projection; 0 is full rank"""
    kv_lora_rank: Positive | None = None
    """Rank of the projection of keys and values"""
    qk_nope_head_dim: Positive | None = None
    """Features of a query's or key's head without rotation"""
    qk_rope_head_dim: Positive | None = None
    """Features of a query's or key's head with rotation"""
    v_head_dim: Positive | None = None
    """Features of a value's head"""


@dataclass
class Data:
    resume = Resume.DATA

    installed: bool = False
    """Dataset "python": read the source of every installed package as well as the standard library"""
    other_files: bool = False
    """
    Dataset "python": also read C, C++ and CUDA source, type stubs and documentation beside the Python source, and the
    system's headers, documentation and manual pages. Such files above 1 MB are left out
    """

    vocab_size: Refused[VocabularySize] = 0
    """Vocabulary size of the model, and of the tokenizer if one is built; 0 keeps the model flavor's size"""
    unseparated: Free[bool] = False
    """Take a tokenizer that has neither a bos nor an eos token: nothing separates the documents"""
    max_bytes: NotNegative = 0
    """Stop collecting text after this many bytes; 0 collects all. Another training.dataset in a flag drops a limit"""
    package_share: ShareAboveZero = 0.2
    """Dataset "python": largest share of the text from a single package, in (0, 1]"""
    validation_share: ShareBelowOne = 0.01
    """
    Share of the documents held out for validation, in [0, 1), chosen by a hash of each document's path for dataset
    "python", of its text for "files" and "hf"
    """

    seed: NotNegative = 0
    """Seed of the order of the documents"""
    text_key: str = "text"
    """Column or key of the text in JSONL, Parquet and Hugging Face datasets"""
    hf_config: str | None = None
    """Dataset "hf": configuration of the Hugging Face dataset, for example "en" for allenai/c4"""
    cache_dir: Free[LocalPath] = ""
    """Folder for tokenizers and tokenized text; empty means $MXTRAIN_CACHE, else ~/.cache/mxtrain"""
    prepared: Free[LocalPath] = ""
    """
    Name of a prepared text in the cache ("mxtrain cache" lists them), or its path: train on exactly this text, without
    reading its source. Empty prepares the text from its source
    """


@dataclass
class Model:
    resume = Resume.FREE

    hf_assets_path: Annotated[LocalPath, Label(variant=True)] = ""
    """Folder with a Hugging Face tokenizer; empty builds a byte-level BPE tokenizer once from the training text"""


@dataclass
class Validation:
    resume = Resume.FREE

    dataset: str = ""
    """
    Text for validation, as in training.dataset. Empty validates on documents that are held out of the training text,
    and on "c4_validation" where training.dataset is TorchTitan's
    """


@dataclass
class Metrics:
    resume = Resume.FREE

    on_nonfinite_loss: Literal["stop", "continue"] = "stop"
    """
    What happens when a loss or, before a checkpoint and at the end, a weight or an optimizer state is NaN or infinite:
    "stop" (with exit status 1) or "continue" (a warning). What is not finite is never saved
    """

    wandb_project: str = ""
    """Project of the wandb run; empty means $WANDB_PROJECT, else mxtrain"""
    wandb_name: str = ""
    """Name of the wandb run; empty means $WANDB_RUN_NAME, else model, flavor, converter, recipe and p"""
    wandb_group: str = ""
    """Group of the wandb run; empty means $WANDB_RUN_GROUP, else model and flavor"""
    wandb_tags: Names = None
    """
    Comma-separated tags of the wandb run. Unset means $WANDB_TAGS, else model, flavor, converter, recipe and p; an
    empty list means no tags
    """


@dataclass
class Checkpoint:
    resume = Resume.FREE

    last_save_model_only: bool = False
    """Save only the weights after the last step: a smaller checkpoint, from which no run can resume"""
    may_change: Names = field(default_factory=list)
    """
    Comma-separated full names of settings, such as "mxnorm.p", that this run may change when it resumes, although the
    change makes the rest of the run another experiment. A change is reported
    """


@dataclass
class JobConfig:
    mxnorm: MXNorm = field(default_factory=MXNorm)
    fused_norm: FusedNorm = field(default_factory=FusedNorm)
    fused_rmsnorm: FusedNorm = field(default_factory=FusedNorm)
    decompose_k_router: DecomposeKRouter = field(default_factory=DecomposeKRouter)
    model_args: ModelArgs = field(default_factory=ModelArgs)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
