"""``mxtrain generate``: continues a text with transformers' own sampler."""

from dataclasses import dataclass

import torch

from mxtrain.errors import ConfigError, require_positive_integer
from mxtrain.hugging_face.pretrained import Pretrained

DEFAULT_NEW_TOKENS = 100


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: number of tokens to add at most; the text ends earlier at an eos token. None stands for
            DEFAULT_NEW_TOKENS, or fewer if the model's longest sequence holds no more.
        temperature: divides the logits. 0 is not allowed: it is ``greedy``.
        top_p: tokens are drawn from the most likely ones that together have this probability.
        greedy: take the most likely token every time; temperature and top_p do nothing.
        seed: the same seed gives the same text on the same machine; None draws a new one.

    Raises:
        ConfigError: for a value out of range.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.8
    top_p: float = 0.95
    greedy: bool = False
    seed: int | None = None

    def __post_init__(self):
        if self.max_new_tokens is not None:
            require_positive_integer("--max-new-tokens", self.max_new_tokens)
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"--temperature = {self.temperature} is not a positive number; --greedy stands for 0")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p = {self.top_p} is not above 0 and at most 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed = {self.seed} is not an integer from 0 to 2^63 - 1")


def generate(pretrained: Pretrained, prompt: str, sampling: Sampling) -> None:
    """Print ``prompt`` and its continuation to stdout, each word as soon as it is there.

    An empty prompt gives a text from its beginning.

    Raises:
        ConfigError: prompt and new tokens are longer than the model's longest sequence.
    """
    from transformers import TextStreamer

    ids = [pretrained.first_token, *pretrained.encode(prompt)]
    longest, room = pretrained.max_seq_len, pretrained.max_seq_len - len(ids)
    if room < 1:
        raise ConfigError(
            f"TEXT has {len(ids)} tokens, bos included, and the model's longest sequence has {longest}: shorten it"
        )
    new_tokens = sampling.max_new_tokens or min(DEFAULT_NEW_TOKENS, room)
    if new_tokens > room:
        raise ConfigError(
            f"--max-new-tokens = {new_tokens} after a prompt of {len(ids)} tokens exceeds the model's longest "
            f"sequence, {longest}: at most {room} fit"
        )
    if sampling.seed is None:
        torch.seed()
    else:
        torch.manual_seed(sampling.seed)
    # transformers' default top_k = 50 would be a second limit.
    drawing = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    model, tokenizer = pretrained.model, pretrained.tokenizer
    inputs = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=new_tokens,
            do_sample=not sampling.greedy,
            pad_token_id=tokenizer.eos_token_id,
            streamer=TextStreamer(tokenizer, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            **({} if sampling.greedy else drawing),
        )
