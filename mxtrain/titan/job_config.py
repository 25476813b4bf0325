"""What mxtrain adds to TorchTitan's job config: the TOML sections ``[mxnorm]``, ``[fused_rmsnorm]``,
``[decompose_k_router]`` and ``[data]``.

TorchTitan merges this class into its own (``job.custom_config_module = "mxtrain.titan.job_config"``)
and shows the docstring under each field in ``--help``. Postponed annotations would turn the field
types into strings, which its merge of nested tables cannot read, so they are not used here.
"""

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec


def _pairs(words: list[str]) -> dict[str, str]:
    return dict(zip_longest(words[::2], words[1::2], fillvalue=""))


def _words(table) -> list[str]:
    # TorchTitan does not check the types in a TOML file; what is no table, ``active_settings`` refuses.
    return [str(word) for pair in table.items() for word in pair] if isinstance(table, dict) else [str(table)]


# A table with any keys. Its flag replaces the TOML's; tyro's own would be one flag for each key that the TOML has.
Table = Annotated[
    dict[str, str],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME RECIPE ...",
        instance_from_str=_pairs,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=_words,
    ),
]


@dataclass
class MXNorm:
    p: int = 2
    """Exponent of the p-mean over block maxima that estimates the RMS: 1 or 2"""

    recipe: str = "mxfp8"
    """
    What the operands of every swapped linear are cast to: "mxfp8", "nvfp4", "nvfp4_dynamic" (no scale is known before
    its values are), or "unquantized" (isolates the norm); or one of these or "bf16" for each matrix product, as in
    "fprop=nvfp4, dgrad=mxfp8, wgrad=bf16". Layers that are all "bf16" are left as they are
    """

    recipes: Table = field(default_factory=dict)
    """
    Recipes for the linears in modules of these names, in the place of mxnorm.recipe; names as in mxnorm.filter_fqns,
    which comes first, as does mxnorm.high_precision_share. Of several names for a linear the last one holds. A norm has
    the recipe of the linears it feeds. In the TOML a table: [mxnorm.recipes], then lines "layers.0" = "bf16"
    """

    estimator: str = "pre_round"
    """
    Where the norm's RMS comes from: "pre_round" (block maxima, the method), "post_round" (block scales
    after rounding, an ablation) or "exact" (the true RMS, a control)
    """

    scale_rounding: str | None = None
    """
    How a block's scale is rounded to a power of two: "rceil" (never overflows, and what unset means) or "floor" (OCP,
    saturates). Not for NVFP4
    """

    tensor_scale: str | None = None
    """
    NVFP4: where the scale of a norm's whole output comes from: "static" (known before training from the bound of
    MXNorm) or "dynamic" (its largest element). Unset, as the recipe says; all other operands have dynamic ones
    """

    weight_tiles: bool | None = None
    """
    NVFP4: weights share a scale in tiles of 16 x 16, the same for fprop and dgrad. Unset, as the recipe says: true
    """

    hadamard: bool | None = None
    """
    NVFP4: a random Hadamard transform along the tokens of both operands of wgrad. Unset, as the recipe says: true
    """

    stochastic_rounding: bool | None = None
    """
    NVFP4: output gradients are rounded stochastically, with random bits from debug.seed (0 if unset), layer, step and
    rank. Unset, as the recipe says: true
    """

    high_precision_share: float | None = None
    """
    The last share of the model's blocks to leave in high precision, besides filter_fqns. Unset, as the recipe says:
    0.15 for NVFP4, 0 for the others
    """

    mode: str = "auto"
    """
    How matrix products run: "native" (MX tensor cores), "emulated" (exact bf16 images of the operands, any GPU),
    "reference" (plain PyTorch in float32, any device), or "auto" (the first of these the hardware has)
    """

    eps: float | None = None
    """Added to the squared RMS estimate; unset keeps the eps of each norm that is replaced"""

    filter_fqns: list[str] = field(default_factory=lambda: ["output"])
    """
    Comma-separated module names to leave in high precision. A name is one or more whole segments of a
    module's FQN, each a literal or a glob: "output", "layers.0", "layers.*.attention.wo". Each must match something
    """


@dataclass
class FusedRMSNorm:
    when_compiled: str = "auto"
    """
    What runs where torch.compile compiles the model: "kernel" (mxtrain's), "formula" (PyTorch's, which the compiler may
    fuse with what is around the norm), or "auto" (what was measured to be faster)
    """

    filter_fqns: list[str] = field(default_factory=list)
    """Comma-separated names of norms, or of modules that hold some, to leave to PyTorch; see mxnorm.filter_fqns"""


@dataclass
class DecomposeKRouter:
    filter_fqns: list[str] = field(default_factory=list)
    """Comma-separated names of gates, or of modules that hold some, to leave to PyTorch; see mxnorm.filter_fqns"""


@dataclass
class Data:
    installed: bool = False
    """Dataset "python": add the source of every installed package to the standard library's"""

    vocab_size: int = 0
    """
    Size of the tokenizer that is built when model.hf_assets_path is empty, and of the model; 0 keeps the flavor's
    """

    max_bytes: int = 0
    """Stop collecting text after this many bytes; 0 takes all there is"""

    package_share: float = 0.2
    """Dataset "python": the largest part of the text that one package may supply, in (0, 1]"""

    validation_share: float = 0.01
    """The part of the documents held out for validation, in [0, 1), chosen by a hash of each document's path"""

    seed: int = 0
    """Seed of the order in which documents are read"""

    text_key: str = "text"
    """The column or key that holds the text in JSONL, Parquet and Hugging Face datasets"""

    hf_config: str | None = None
    """Dataset "hf": the configuration of the Hugging Face dataset, for example "en" for allenai/c4"""

    cache_dir: str = ""
    """Where tokenizers and tokenized text are kept; empty means $MXTRAIN_CACHE, else ~/.cache/mxtrain"""


@dataclass
class Model:
    hf_assets_path: str = ""
    """Folder with a Hugging Face tokenizer; empty builds a byte-level BPE tokenizer from the training text, once"""


@dataclass
class JobConfig:
    mxnorm: MXNorm = field(default_factory=MXNorm)
    fused_rmsnorm: FusedRMSNorm = field(default_factory=FusedRMSNorm)
    decompose_k_router: DecomposeKRouter = field(default_factory=DecomposeKRouter)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
