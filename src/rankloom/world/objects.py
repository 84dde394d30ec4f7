"""Values that are not tensors, from all ranks to rank 0, and from it to each. JSON values only: nothing is unpickled.

    Group.all_gather_object    every rank gets the values of all; what is large on each of thousands of ranks must not go this way
    gather_object              rank 0 gets them
    scatter_object             rank 0 has a value for each rank

Both functions are an all-to-all of texts, most of them empty. Read world/group.py before this file.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from rankloom.world.group import Group


def gather_object(group: Group, value: Any, *, label: str = "") -> list[Any]:
    """Every rank's `value`, in rank order, on rank 0; on the others, an empty list. A collective.

    sent: 8 bytes to each other rank, and `value` as JSON to rank 0
    """
    arrived = _dealt(group, [json.dumps(value).encode(), *[b""] * (group.size - 1)], label)
    return [] if group.rank else [json.loads(text) for text in arrived]


def scatter_object(group: Group, values: Sequence[Any], *, label: str = "") -> Any:
    """The value that rank 0 has for this rank. A collective.

    values: on rank 0, one for each rank, in rank order; on the others, anything
    sent:   8 bytes to each other rank, and by rank 0 to each its value as JSON
    """
    if group.rank == 0:
        assert len(values) == group.size, f"{len(values)} values for {group.size} ranks"
    texts = [b""] * group.size if group.rank else [json.dumps(value).encode() for value in values]
    return json.loads(next(_dealt(group, texts, label)))


def _dealt(group: Group, texts: Sequence[bytes], label: str) -> Iterator[bytes]:
    """Send each text to its rank. The texts for this rank, in rank order."""
    lengths = [len(text) for text in texts]
    expected = group.all_to_all(torch.tensor(lengths, device=group.device), label=f"{label}: length").tolist()
    sent = torch.from_numpy(np.frombuffer(bytearray(b"".join(texts)), np.uint8)).to(group.device)   # torch.frombuffer takes no 0 bytes
    data = group.all_to_all(sent, send_rows=lengths, recv_rows=expected, label=f"{label}: text").cpu().numpy().data
    return (bytes(data[start:end]) for start, end in pairwise(accumulate(expected, initial=0)))
