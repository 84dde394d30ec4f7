"""Buffers that training changes (running statistics) stay equal over the ranks: after each step they are averaged."""

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor, nn

from rankloom.shard.flat import by_dtype
from rankloom.world.group import Group

Seen = tuple[Tensor, int, int]   # a buffer, how often its module's buffers had been written, and where it lay


class BufferKeeper:
    """Keeps buffers that training changes (running statistics) equal over the ranks: their mean, after each step.

    Which buffers those are is seen from torch's version counters, module by module, and from some of their bits, and agreed on, so a
    buffer that only some ranks changed is no hang. One that was found by its bits is averaged from then on in every step: the next write
    may be to others. Constants (rotary tables) never travel, and a cache that is not alike on all ranks, or that only some have made, is
    left to each.
    """

    def __init__(self, model: nn.Module, group: Group):
        self.model, self.group = model, group
        self._before = self._seen()
        self._always = set[str]()   # names of those that are written by what nobody counts
        self._sampled = Sampled(self._quiet(self._before))
        self._own = self._common = list(self._before)   # names here, and everywhere, when ranks last told each other

    def average_changed(self) -> list[str]:
        """After a step: the names of the buffers that changed on any rank, now equal on all. Every rank must call it."""
        now = self._seen()
        if not (now or self._common):
            return []
        self._always |= self._sampled.changed() & self._quiet(now).keys()
        mine = [(list(now) != self._own, 0, 0)]
        for name, seen in ((name, now.get(name)) for name in self._common):
            kind = crc32(f"{list(seen[0].shape)} {seen[0].dtype}".encode()) if seen else 0
            mine.append((name in self._always or not _same(self._before.get(name), seen), kind, -kind))
        flags = torch.tensor(mine, device=self.group.device)
        (others, *_), *found = self.group.all_reduce(flags, "max", label="which buffers changed").tolist()
        if others:
            everyone = self.group.all_gather_object(list(now), label="which buffers there are")
            self._own, self._common = list(now), [name for name in everyone[0] if all(name in names for names in everyone)]
            return self.average_changed()
        changed = [name for name, (flag, most, least) in zip(self._common, found) if flag and most == -least]
        for name in changed:
            buffer = now[name][0].detach()
            buffer = torch.view_as_real(buffer) if buffer.is_complex() else buffer
            # A count (batches tracked) is the same everywhere; where it is not, the largest is the honest one.
            op = "mean" if buffer.is_floating_point() else "max"
            buffer.copy_(self.group.all_reduce(buffer.clone(memory_format=torch.contiguous_format), op, label=f"buffer {name}"))
        now = self._seen()
        if (quiet := self._quiet(now)).keys() != self._sampled.names:
            self._sampled = Sampled(quiet)
        self._before = now
        return changed

    def forget_changes(self) -> None:
        """What has been written so far is equal on all ranks."""
        self._before = self._seen()
        self._sampled = Sampled(self._quiet(self._before))

    def _quiet(self, now: dict[str, Seen]) -> dict[str, Tensor]:
        """Buffers that nobody is known to have written."""
        if self.group.size == 1:
            return {}
        return {name: seen[0] for name, seen in now.items() if name not in self._always and _same(self._before.get(name), seen)}

    def _seen(self) -> dict[str, Seen]:
        # Batch norm's kernels write their statistics without counting; but its number of batches is counted, beside them.
        versions = {id(b): sum(_version(other) for other in module.buffers(recurse=False))
                    for module in self.model.modules() for b in module.buffers(recurse=False)}
        return {name: (buffer, versions[id(buffer)], address_of(buffer)) for name, buffer in self.model.named_buffers()}


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version   # torch counts no writes of what inference mode has made


def _same(before: Seen | None, now: Seen | None) -> bool:
    """Whether it is the same tensor, untouched like those beside it; a module may also put another in its place."""
    return before is not None and now is not None and before[0] is now[0] and before[1:] == now[1:]


def address_of(tensor: Tensor) -> int:
    """Where its elements lie; 0 where they have no memory."""
    return tensor.data_ptr() if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta else 0


SAMPLE = 512   # elements: every write of a whole is seen in them, and 64 tables of 1 MiB take 0.2 ms
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}   # by their bytes


class Sampled:
    """Elements of tensors as bits: torch's version counters see no write through `.data`, nor those of some kernels (batch norm).

    In tensors of more than SAMPLE elements it sees a write only if that changes one of those that are looked at.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.names = set(tensors)
        views = {name: view for name, tensor in tensors.items() if (view := _bits(tensor)) is not None}
        self._views = by_dtype(views, list(views))   # some: a copy and a comparison for each, however many tensors there are
        self._before = self._now()

    def changed(self) -> set[str]:
        """Names of those that were written since this was made, as far as it sees."""
        found: set[str] = set()
        for views, before, now in zip(self._views, self._before, self._now()):
            if not torch.equal(before, now):
                sizes = [view.numel() for view in views.values()]
                found |= {name for name, old, new in zip(views, before.split(sizes), now.split(sizes)) if not torch.equal(old, new)}
        return found

    def _now(self) -> list[Tensor]:
        return [torch.cat(list(views.values())) for views in self._views]


def _bits(tensor: Tensor) -> Tensor | None:
    """At most SAMPLE elements of a tensor of floats, as integers (a NaN is itself), in its own memory; None where they cannot be had."""
    tensor = tensor.detach()
    if not address_of(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))   # so that one whose dims were swapped is flat
    if not tensor.is_contiguous():
        return None
    step = -(-tensor.numel() // SAMPLE)
    step += step % 2 == 0   # or it would see few columns of a matrix
    return tensor.view(-1).view(INTEGERS[tensor.itemsize])[::step]
