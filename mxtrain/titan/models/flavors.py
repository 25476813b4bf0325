"""mxtrain's additional model flavors, and a vocabulary size that the job config can set."""

import copy
from collections import UserDict
from collections.abc import Mapping
from dataclasses import fields

from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import has_cuda_capability

from mxtrain.errors import ConfigError, require_one_of

EXTRA_FLAVORS = {
    "llama3": {
        "125M": TransformerModelArgs(dim=768, n_layers=12, n_heads=12, vocab_size=32768, rope_theta=500000),
        # The shape of Llama 3.2 1B with a separate output matrix: 1.5 billion parameters in total.
        "1B": TransformerModelArgs(
            dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5, rope_theta=500000
        ),
    },
    "qwen3": {
        # Smaller than TorchTitan's debugmodel_moe: its 300 million parameters take a CPU one minute per step.
        "debugmodel_moe_16": Qwen3ModelArgs(
            dim=256,
            n_layers=4,
            n_heads=8,
            n_kv_heads=4,
            head_dim=64,
            hidden_dim=768,
            vocab_size=2048,
            moe_enabled=True,
            moe_inter_dim=256,
            moe_args=MoEArgs(
                num_experts=16,
                num_shared_experts=0,
                top_k=4,
                score_func="softmax",
                route_norm=True,
                score_before_experts=False,
            ),
        ),
    },
}


def vocab_size(job_config) -> int:
    """Return the model's vocabulary size: ``data.vocab_size``, or the flavor's if that is 0.

    Raises:
        ConfigError: for an unknown ``model.flavor``, a ``data.vocab_size`` that is negative or not an integer, or
            one that a user's own model does not take.
    """
    size = job_config.data.vocab_size
    if type(size) is not int or size < 0:  # TorchTitan does not check types in TOML files
        problem = "not a whole number" if type(size) is not int else "negative"
        raise ConfigError(f"data.vocab_size = {size!r} is {problem}; 0 keeps the flavor's size")
    name, flavor = job_config.model.name, job_config.model.flavor
    flavors = get_train_spec(name).model_args
    require_one_of("model.flavor", flavor, flavors)
    if size > 0 and isinstance(flavors, _Flavors):
        return size
    own_size = flavors[flavor].vocab_size
    if size not in (0, own_size):
        raise ConfigError(
            f"data.vocab_size = {size} is not the {own_size} of model.name = {name!r}, which takes no other: allowed "
            "is 0; with_mxtrain from mxtrain.titan lets a model of your own take any size"
        )
    return own_size


def configurable(flavors: Mapping) -> Mapping:
    """Return the same model arguments by flavor, with a vocabulary size that the job config can set."""
    return _Flavors(flavors)


class _Flavors(UserDict):
    """Model arguments by flavor, with a vocabulary size that the job config can set, also those that a user adds.

    Every access returns a copy, because TorchTitan writes a job's settings into it.
    """

    def __getitem__(self, flavor):
        return copy.deepcopy(super().__getitem__(flavor))

    def __setitem__(self, flavor, args):
        super().__setitem__(flavor, _with_configured_vocabulary(args))


def _with_configured_vocabulary(args):
    """Return the same model arguments with an ``update_from_config`` that also sets the vocabulary size.

    It also makes experts run one after another on devices without a grouped matrix product, which only some of
    TorchTitan's models do themselves.
    """

    class Configured(type(args)):
        def update_from_config(self, job_config, **kwargs) -> None:
            super().update_from_config(job_config, **kwargs)
            if job_config.data.vocab_size > 0:
                self.vocab_size = job_config.data.vocab_size
            if hasattr(self, "moe_args") and not has_cuda_capability(9, 0):
                self.moe_args.use_grouped_mm = False

    Configured.__name__ = Configured.__qualname__ = type(args).__name__
    return Configured(**{f.name: getattr(args, f.name) for f in fields(args)})
