"""A model of TorchTitan 0.3 by its sizes, as export and import see it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchtitan.models.common.moe import GroupedExperts

from mxtrain.titan.v03.models import DEFAULTS, FLAVORS, adapter_of, config_of, sizes_of


@dataclass(frozen=True)
class SizedModel:
    """A model with causal attention and without data.

    Attributes:
        name: TorchTitan's.
        sizes: by their names in ``[model_args]``, "vocab_size" and "seq_len"; "num_experts" only if it has any.
    """

    name: str
    sizes: dict[str, object]

    @staticmethod
    def flavors(name: str) -> list[str]:
        """The flavors of a model."""
        return list(FLAVORS.get(name, ()))

    @classmethod
    def of_flavor(cls, name: str, flavor: str, given: Mapping[str, object] = {}, vocab_size: int = 0) -> "SizedModel":
        """A flavor with settings of ``[model_args]``, and another vocabulary if it is not 0."""
        sizes = {"seq_len": 2048, **DEFAULTS[name], **FLAVORS[name][flavor], **given}
        return cls(name, sizes | ({"vocab_size": vocab_size} if vocab_size else {}))

    @classmethod
    def of_job(cls, job_config) -> "SizedModel":
        """The model of a job."""
        return cls(job_config.model.name, sizes_of(job_config))

    def shortened(self, n_layers: int, seq_len: int) -> "SizedModel":
        """The same model with so many layers and positions."""
        return replace(self, sizes={**self.sizes, "n_layers": n_layers, "seq_len": seq_len})

    def on_meta(self) -> nn.Module:
        """The model without converters on the meta device, fp32."""
        with torch.device("meta"):
            return config_of(self.name, self.sizes).build()

    def adapter(self):
        """TorchTitan's adapter, for one parameter at a time."""
        return adapter_of(self.name)(config_of(self.name, self.sizes), None)

    def unlike_transformers(self) -> Iterator[str]:
        """What transformers do not compute: nothing that sizes can set."""
        return iter(())


class _ExpertsInFP32(GroupedExperts):
    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        y_RD, start = torch.zeros_like(x_RD), 0
        for count, w1, w2, w3 in zip(num_tokens_per_expert_E.tolist(), self.w1_EFD, self.w2_EDF, self.w3_EFD):
            x, end = x_RD[start : start + int(count)], start + int(count)
            y_RD[start:end] = F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
            start = end
        return y_RD


def multiply_experts_in_fp32(model: nn.Module) -> None:
    """Multiply weights of experts one after another: TorchTitan's grouped product rounds to bf16."""
    for module in model.modules():
        if type(module) is GroupedExperts:
            module.__class__ = _ExpertsInFP32
