"""TorchTitan's Llama 3 with two additions: any hidden size, and an output head that has the embedding's weight."""

from dataclasses import dataclass, fields

import torch
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import FeedForward, Transformer
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

HEAD = "output.weight"
HF_HEAD, HF_EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass
class Llama3Args(TransformerModelArgs):
    """TorchTitan's arguments, with the additions as TorchTitan's Qwen3 has them."""

    enable_weight_tying: bool = False

    @classmethod
    def of(cls, args: TransformerModelArgs) -> "Llama3Args":
        """Return the same arguments as ``Llama3Args``."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(args)})

    @property
    def hidden_dim(self) -> int:
        """Hidden features of the feed-forward, which TorchTitan computes from three fields."""
        return hidden_dim(self)

    @hidden_dim.setter
    def hidden_dim(self, size: int) -> None:
        # TorchTitan rounds a multiple of 8/3 of dim up to a multiple: here to the first one, for the present dim.
        self.multiple_of, self.ffn_dim_multiplier = size, size / int(2 * (4 * self.dim) / 3)


def hidden_dim(args: TransformerModelArgs) -> int:
    """Return the hidden features of the feed-forward, as TorchTitan's own code computes them."""
    with torch.device("meta"):
        feed_forward = FeedForward(args.dim, 4 * args.dim, args.multiple_of, args.ffn_dim_multiplier)
    return feed_forward.w1.out_features


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
            state_dict = {name: weight for name, weight in state_dict.items() if name != HEAD}
        return super().to_hf(state_dict)

    def from_hf(self, hf_state_dict: dict) -> dict:
        if is_tied(self.model_args) and HF_EMBEDDING in hf_state_dict:
            hf_state_dict = {**hf_state_dict, HF_HEAD: hf_state_dict[HF_EMBEDDING]}
        return super().from_hf(hf_state_dict)
