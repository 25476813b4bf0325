"""Which tokens are measured: groups of neighbors, spread evenly over the batch."""

from functools import lru_cache

import torch

GROUP = 32
"""
Tokens in a group: the longest block of any format. Wgrad casts in blocks along tokens, so groups begin where blocks do
"""


@lru_cache(maxsize=16)  # all modules of a model have the same few numbers of tokens
def sampled_tokens(available: int, wanted: int, device: torch.device) -> torch.Tensor:
    """Return the indices of at most ``wanted`` of ``available`` tokens, int64, a multiple of 32 of them in order.

    At least one group is taken if there is one. Fewer than 32 tokens give no index.
    """
    groups = available // GROUP
    taken = min(groups, max(1, wanted // GROUP))
    first = torch.arange(taken, device=device) * groups // max(taken, 1) * GROUP
    return (first.unsqueeze(1) + torch.arange(GROUP, device=device)).flatten()
