"""Describe how values differ that should be equal on all ranks."""

from collections.abc import Mapping, Sequence


def first_difference(what: str, everyone: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str | None:
    """A message about the first rank whose values are not those of `ranks[0]`, with up to three differences; None where all are equal.

    everyone: the values of each of `ranks`, by name

    >>> print(first_difference("config", [{"steps": "5", "seed": "0"}, {"steps": "6", "seed": "0"}], [0, 1]))
    rank 1 was given another config than rank 0: steps is 6, on rank 0 5; give all ranks the same
    """
    expected, first = everyone[0], ranks[0]
    for rank, theirs in zip(ranks, everyone, strict=True):
        differ = [f"{name} is {theirs.get(name, 'missing')}, on rank {first} {expected.get(name, 'missing')}"
                  for name in dict.fromkeys((*expected, *theirs)) if theirs.get(name) != expected.get(name)]
        if differ:
            return f"rank {rank} was given another {what} than rank {first}: {'; '.join(differ[:3])}; give all ranks the same"
    return None
