"""The tokens that a run has seen, in checkpoints that other numbers of ranks load."""


class TokenCount:
    """Converts between the tokens that one rank has seen and the tokens that all ranks have seen.

    So the count goes on when the number of ranks changes. TorchTitan counts on every rank, adds up the counts of all
    ranks for its metrics, and saves the count of one rank.
    All ranks see as many tokens in a step, so one rank's count gives the count of all.

    Args:
        ranks: number of ranks whose counts TorchTitan adds up.
        rank: this rank among them.
    """

    def __init__(self, ranks: int, rank: int):
        self._ranks = ranks
        self._rank = rank
        self._loaded = self._share = 0

    def of_all_ranks(self, own: int) -> int:
        """Return the tokens that all ranks have seen, if this rank has seen ``own``."""
        return self._loaded + (own - self._share) * self._ranks

    def share(self, of_all_ranks: int) -> int:
        """Return this rank's share of the tokens that earlier ranks have seen. The shares add up to all of them."""
        own, rest = divmod(of_all_ranks, self._ranks)
        self._loaded, self._share = of_all_ranks, own + (self._rank < rest)
        return self._share
