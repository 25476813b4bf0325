"""TorchTitan's model arguments: mxtrain's flavors, the sizes that ``[model_args]`` and ``[data]`` set, their checks."""

import copy
from collections import UserDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import reduce
from operator import attrgetter

import torch
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import FeedForward, Transformer
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.llama4.model.args import RoPEScalingArgs as Llama4RoPEScalingArgs
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import has_cuda_capability

from mxtrain.errors import ConfigError, require_one_of
from mxtrain.hugging_face.import_model import EMBEDDING, HEAD
from mxtrain.settings.fields import Problems, Settings
from mxtrain.settings.machine import degree
from mxtrain.settings.model_settings import OWN_FLAVORS, PLACES, given_in
from mxtrain.titan.job_config import PIPELINE, TENSOR


@dataclass
class Llama3Args(TransformerModelArgs):
    """TorchTitan's arguments, with the additions as TorchTitan's Qwen3 has them."""

    enable_weight_tying: bool = False

    @property
    def hidden_dim(self) -> int:
        """Hidden features of the feed-forward, as TorchTitan's own code computes them from three fields."""
        with torch.device("meta"):
            feed_forward = FeedForward(self.dim, 4 * self.dim, self.multiple_of, self.ffn_dim_multiplier)
        return feed_forward.w1.out_features

    @hidden_dim.setter
    def hidden_dim(self, size: int) -> None:
        # TorchTitan rounds a multiple of 8/3 of dim up to a multiple: here to the first one, for the present dim.
        self.multiple_of, self.ffn_dim_multiplier = size, size / int(2 * (4 * self.dim) / 3)


def is_tied(args) -> bool:
    """Return whether the output's weight is the embedding's. Not all of TorchTitan's model arguments can say so."""
    return getattr(args, "enable_weight_tying", False)


class Llama3(Transformer):
    """TorchTitan's model. With ``enable_weight_tying`` it treats the shared weight as TorchTitan's Qwen3 does."""

    def __init__(self, model_args: Llama3Args):
        super().__init__(model_args)
        self._tie()

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Draw weights as TorchTitan does; a shared weight last as a head, whose values are the smaller ones."""
        self._tie()  # whatever gave the parameters memory has made two of one
        super().init_weights(buffer_device)

    def _tie(self) -> None:
        if is_tied(self.model_args):
            self.output.weight = self.tok_embeddings.weight


class Llama3Adapter(Llama3StateDictAdapter):
    """TorchTitan's names of Hugging Face, where a shared weight has one name."""

    def to_hf(self, state_dict: dict) -> dict:
        if is_tied(self.model_args):
            state_dict = {name: weight for name, weight in state_dict.items() if name != "output.weight"}
        return super().to_hf(state_dict)

    def from_hf(self, hf_state_dict: dict) -> dict:
        if is_tied(self.model_args) and EMBEDDING in hf_state_dict:
            hf_state_dict = {**hf_state_dict, HEAD: hf_state_dict[EMBEDDING]}
        return super().from_hf(hf_state_dict)


_OF_ANY_MODEL = {name: name for name in ("n_layers", "n_heads", "n_kv_heads", "enable_weight_tying")}
_OF_ANY_MODEL["num_experts"] = "moe_args.num_experts"
_OTHER_SIZES = {
    "groups": "moe_args.num_expert_groups",
    "limited_groups": "moe_args.num_limited_groups",
    "mscale": "mscale",
    **{name: f"moe_args.{name}" for name in ("route_norm", "route_scale", "score_func")},
}


class Flavors(UserDict):
    """Model arguments by flavor that the job config can set, also mxtrain's and those that a user adds.

    Every access returns a copy, because TorchTitan writes a job's settings into it.

    Args:
        model: TorchTitan's name of the model; None for a model of the user's own, whose sizes ``[model_args]`` does
            not set.
    """

    def __init__(self, model: str | None, flavors: Mapping):
        self._model = model
        super().__init__(flavors)
        for flavor, sizes in OWN_FLAVORS.get(model, {}).items():
            args = self.data[flavor] = self["debugmodel_moe" if model == "qwen3" else "debugmodel"]
            args.set_model_args(sizes)
            args.vocab_size = sizes["vocab_size"]

    def __getitem__(self, flavor):
        return copy.deepcopy(super().__getitem__(flavor))

    def __setitem__(self, flavor, args):
        super().__setitem__(flavor, _configured(self._model, args))


def _configured(model: str | None, args):
    """Return the same model arguments with an ``update_from_config`` that also applies mxtrain's settings.

    It also makes experts run one after another on devices without a grouped matrix product, which only some of
    TorchTitan's models do themselves.
    """
    kind = Llama3Args if type(args) is TransformerModelArgs else type(args)

    class Configured(kind):
        def update_from_config(self, job_config, **kwargs) -> None:
            if hasattr(self, "moe_args") and not has_cuda_capability(9, 0):
                self.moe_args.use_grouped_mm = False  # first, because some of TorchTitan's models warn of a failure
            super().update_from_config(job_config, **kwargs)
            self.set_model_args(given_in(job_config))
            if job_config.data.vocab_size > 0:
                self.vocab_size = job_config.data.vocab_size

        def set_model_args(self, given: Mapping[str, object]) -> None:
            """Set the fields that settings of ``[model_args]`` stand for."""
            for name, place in PLACES[model].items() if model else ():
                if place and name in given:  # in this order: llama3's hidden size depends on dim
                    *path, last = place.split(".")
                    if path == ["rope_scaling_args"] and self.rope_scaling_args is None:
                        self.rope_scaling_args = Llama4RoPEScalingArgs()
                    value = None if name == "load_balance_coeff" and given[name] == 0 else given[name]
                    setattr(reduce(getattr, path, self), last, value)

        def get_nparams_and_flops(self, module, seq_len: int) -> tuple[int, int]:
            parameters, flops = super().get_nparams_and_flops(module, seq_len)
            # TorchTitan leaves the weight of a tied head out of both numbers, although the head multiplies it.
            missing = sum(weight.numel() for weight in module.parameters()) - parameters
            return parameters + missing, flops + 6 * missing

    Configured.__name__ = Configured.__qualname__ = kind.__name__
    return Configured(**{f.name: getattr(args, f.name) for f in fields(args)})


def sizes_of(job) -> dict[str, object]:
    name, size, flavors = job.model.name, job.data.vocab_size, get_train_spec(job.model.name).model_args
    require_one_of("model.flavor", job.model.flavor, flavors)
    args = flavors[job.model.flavor]
    if isinstance(flavors, Flavors):
        args.set_model_args(given_in(job))
        args.vocab_size = size or args.vocab_size
    elif size not in (0, args.vocab_size):
        raise ConfigError(
            f"data.vocab_size = {size} must be 0 or {args.vocab_size}, the size of model.name = {name!r}; with_mxtrain "
            "from mxtrain.titan lets a model of your own take any size"
        )
    return {**sizes_in(name, args), "seq_len": job.training.seq_len}


def sizes_in(model: str, args) -> dict[str, object]:
    """The sizes in TorchTitan's model arguments by their names in ``[model_args]``; of experts only if there are any.

    Also those that have no setting: ``_OTHER_SIZES``.
    """
    places = {**PLACES.get(model, _OF_ANY_MODEL), **_OTHER_SIZES}
    if not getattr(args, "moe_enabled", True):
        places = {name: place for name, place in places.items() if not place.startswith("moe_")}
    sizes = {"vocab_size": args.vocab_size}
    for name, place in places.items():
        if place:
            with suppress(AttributeError):  # llama4 without scaled rotation, and models without experts
                sizes[name] = attrgetter(place)(args)
    if sizes.get("load_balance_coeff", 0) is None:
        sizes["load_balance_coeff"] = 0  # as in [model_args], which has no None
    return sizes


def layout_problems(settings: Settings) -> Problems:
    """Degrees of parallelism that work in TorchTitan 0.3 only, or nowhere."""
    spec, model = get_train_spec(settings["model.name"]), f"{settings['model.name']} {settings['model.flavor']}"
    args = spec.model_args[settings["model.flavor"]]
    if degree(settings, "context") > 1:
        if (attention := getattr(args, "attn_type", "sdpa")) != "sdpa":
            problem = f"works with attention 'sdpa', and {model} has {attention!r}: allowed is 1"
            yield "parallelism.context_parallel_degree", problem
        for name, allowed in (("load_balancer", "headtail"), ("rotate_method", "allgather")):
            if settings[f"parallelism.context_parallel_{name}"] not in (allowed, None):
                yield f"parallelism.context_parallel_{name}", f"is not supported: allowed is {allowed!r}"
    if degree(settings, "expert_tensor") > 1:
        instead = "experts are split by parallelism.expert_parallel_degree alone"
        yield "parallelism.expert_tensor_parallel_degree", f"is not supported: {instead}; allowed is 1"
    if sizes_of(settings.values).get("enable_weight_tying") and degree(settings, "tensor") > 1:
        parts = f"makes two weights of the one that embedding and head of {model} share in TorchTitan 0.2.2"
        yield TENSOR, f"{parts}: allowed is 1, or model_args.enable_weight_tying = false"
    # Without with_mxtrain, nothing divides a pipeline's loss by the number of tokens.
    if degree(settings, "pipeline") > 1 and not (spec.pipelining_fn and isinstance(spec.model_args, Flavors)):
        yield PIPELINE, f"does not work with {model}: allowed is 1"
