"""Buffers that training changes (running statistics) stay equal on all ranks: they are averaged after each step.

From the second step on none of this waits for a GPU, in whose queue the backward still is: what is known of versions goes from CPU to CPU,
and a comparison of samples is read one step after it was queued.
"""

from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from rankloom.base.tensors import memory_address, overwrite, version_of
from rankloom.shard.flat import by_dtype
from rankloom.world.group import Group

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64,
         torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}   # of these, gloo can compare no numbers


class Seen(NamedTuple):
    """What is known of a buffer without a look at its values."""

    buffer: Tensor
    writes: int    # to all buffers of its module
    address: int

    @property
    def kind(self) -> int:
        """A number of its shape and dtype."""
        return crc32(f"{list(self.buffer.shape)} {self.buffer.dtype}".encode())


class BufferKeeper:
    """Averages buffers that training changes (running statistics) over the ranks, after each step.

    torch's version counters, compared module by module, and samples of the values show which buffers have changed. Ranks agree on these,
    so a buffer that only some ranks changed causes no hang. A change that only the samples showed might be missed the next time, so
    that buffer is averaged in every step from then on. Constants (rotary tables) are never sent. A cache whose shape differs between
    ranks, or that only some ranks have, stays as it is. While no rank has buffers, nothing is sent: ranks learn of the first ones by a
    mark in the message that ends each step.

    On a GPU the samples are read at once after the first step, which finds what every step writes. Later they are read one step late:
    a buffer that is then written unseen for the first time is averaged after the step that follows.
    """

    def __init__(self, model: nn.Module, group: Group):
        self.model, self.group = model, group
        self._before = self._seen()
        self._always = set[str]()   # names of buffers that are written without bumping versions
        self._sampled = Sampled(self._quiet(self._before))
        self._late: Callable[[], set[str]] | None = None   # tells what the samples showed after the last step
        self._own = self._common = list(self._before)   # names on this rank, and names on all ranks, at the last exchange
        self._any = bool(self._before)   # whether any rank has had buffers: from then on all take part in an exchange after each step
        self._first = False              # whether this rank has them, when no rank had before

    def mark(self) -> int:
        """At the end of a step, for ranks to compare in a message that is sent anyway: 1 where this rank has the first buffers, else 0."""
        self._first = not self._any and bool(self._seen())
        return int(self._first)

    def heed(self, alike: bool) -> None:
        """Before `average_changed`: take note of the buffers of ranks that had none before. alike: whether all have the same mark"""
        self._any |= self._first or not alike

    def average_changed(self) -> list[str]:
        """After a step: average the buffers that changed on any rank. Returns their names. A collective.

        sent: an all-reduce of 24 bytes for each buffer, between CPUs, and one for each buffer that changed
        """
        if not self._any:
            return []
        now = self._seen()
        self._look_at_samples(now)
        changed = self._changed_on_any_rank(now)
        if changed is None:
            everyone = self.group.all_gather_object(list(now), label="which buffers there are")
            self._own, self._common = list(now), [name for name in everyone[0] if all(name in names for names in everyone)]
            return self.average_changed()
        for name in changed:
            self._average(now[name].buffer, f"buffer {name}")
        before, self._before = self._before, self._seen()
        quiet = self._quiet(self._before)
        # A buffer that was averaged, or written openly, may be written unseen in the next step: its sample must be of its present values.
        if quiet.keys() != self._sampled.names or not all(_same(before.get(name), self._before[name]) for name in quiet):
            self._sampled = Sampled(quiet)
        return changed

    def _changed_on_any_rank(self, now: dict[str, Seen]) -> list[str] | None:
        """The buffers that any rank has changed, and that are alike on all; None if a rank has others than at the last exchange."""
        rows = [(list(now) != self._own, 0, 0)]
        for name, seen in ((name, now.get(name)) for name in self._common):
            kind = seen.kind if seen else 0   # alike on all ranks where the largest is the least, which is the largest of the negative ones
            rows.append((name in self._always or not _same(self._before.get(name), seen), kind, -kind))
        message = torch.tensor(rows, device="cpu")   # on a GPU it would be known only when the whole backward has ended
        (has_others, *_), *found = self.group.all_reduce(message, "max", label="which buffers changed").tolist()
        if has_others:
            return None
        return [name for name, (is_changed, most, least) in zip(self._common, found) if is_changed and most == -least]

    def _look_at_samples(self, now: dict[str, Seen]) -> None:
        """Note the buffers that were written without being counted: on a GPU, in the step before; see the class."""
        look = partial(self._sampled.compare(), among=self._quiet(now).keys())
        if self._late is None or self.group.device.type == "cpu":
            self._always |= look()
            self._late = set   # nothing is left to tell
        else:
            self._always |= self._late()
            self._late = look

    def _average(self, buffer: Tensor, label: str) -> None:
        """Average a buffer: floats in a wider dtype (fp64 has none), so that what is equal on all ranks stays so to the last bit."""
        values = buffer.detach()
        values = torch.view_as_real(values.resolve_conj()) if buffer.is_complex() else values.resolve_neg()
        # A count (batches tracked) is usually the same on all ranks; if not, take the largest.
        op = "mean" if values.is_floating_point() else "max"
        wide = WIDER.get(values.dtype, values.dtype)
        common = self.group.all_reduce(values.to(wide, copy=True, memory_format=torch.contiguous_format), op, label=label).to(values.dtype)
        overwrite(buffer, torch.view_as_complex(common) if buffer.is_complex() else common)

    def forget_changes(self) -> None:
        """Take the present values as unchanged: they are equal on all ranks."""
        self._before = self._seen()
        self._sampled = Sampled(self._quiet(self._before))

    def _quiet(self, now: dict[str, Seen]) -> dict[str, Tensor]:
        """Name -> buffer, for those not known to have changed."""
        if self.group.size == 1:
            return {}
        return {name: seen.buffer for name, seen in now.items() if name not in self._always and _same(self._before.get(name), seen)}

    def _seen(self) -> dict[str, Seen]:
        """The buffers as they are now, by name."""
        # Batch norm's kernels do not bump the versions of its statistics; but its number of batches, beside them, is bumped.
        versions: dict[int, int] = {}   # id of a buffer -> writes to all buffers of its module
        for module in self.model.modules():
            if module._buffers:
                buffers = list(module.buffers(recurse=False))
                versions |= dict.fromkeys(map(id, buffers), sum(map(version_of, buffers)))
        if not versions:
            return {}
        return {name: Seen(buffer, versions[id(buffer)], memory_address(buffer)) for name, buffer in self.model.named_buffers()
                if buffer.layout is torch.strided}


def _same(before: Seen | None, now: Seen | None) -> bool:
    """Whether it is the same tensor in the same memory, and no buffer of its module was written."""
    return before is not None and now is not None and before.buffer is now.buffer and before[1:] == now[1:]


SAMPLE = 512   # elements: they show a write of a whole tensor, and 64 tables of 1 MiB take 0.2 ms
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}   # by itemsize


class Sampled:
    """Samples of tensors, bit by bit: torch's version counters miss writes through `.data`, and by some kernels (batch norm).

    In a tensor of more than SAMPLE elements, a write shows only if it changes one of the sampled elements.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.names = set(tensors)
        views = {name: view for name, tensor in tensors.items() if (view := _bits(tensor)) is not None}
        self._views = by_dtype(views, list(views))   # few groups: one copy and one comparison per group, for any number of tensors
        self._before = self._now()

    def compare(self) -> Callable[..., set[str]]:
        """Take samples now. What this returns tells later which of the tensors `among` some names have changed; it waits for the device,
        if that has not come so far yet."""
        masks = [_difference(before, now) for before, now in zip(self._before, self._now())]

        def changed(among: Set[str]) -> set[str]:
            found: set[str] = set()
            for views, mask in zip(self._views, masks):
                if (differs := mask()).any():
                    parts = differs.split([view.numel() for view in views.values()])
                    found |= {name for name, part in zip(views, parts) if part.any()}
            return found & among
        return changed

    def _now(self) -> list[Tensor]:
        return [torch.cat(list(views.values())) for views in self._views]


def _difference(before: Tensor, now: Tensor) -> Callable[[], Tensor]:
    """The mask [n] of where two tensors differ, on the CPU. On a GPU the comparison is queued here, and only who asks for it waits."""
    mask = (before != now).to("cpu", non_blocking=True)
    if before.is_cpu:
        return lambda: mask
    arrived = torch.cuda.current_stream(before.device).record_event()

    def told() -> Tensor:
        arrived.synchronize()
        return mask
    return told


def _bits(tensor: Tensor) -> Tensor | None:
    """A view of at most SAMPLE elements, as integers (so that NaN equals itself); None if there can be no view."""
    tensor = tensor.detach()
    if not memory_address(tensor) or tensor.is_quantized:
        return None
    tensor = tensor.conj() if tensor.is_conj() else torch._neg_view(tensor) if tensor.is_neg() else tensor   # the memory as it is
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))   # a transposed tensor becomes contiguous
    if not tensor.is_contiguous():
        return None
    step = -(-tensor.numel() // SAMPLE)
    step += step % 2 == 0   # an even step would hit few columns of a matrix
    return tensor.view(-1).view(INTEGERS[tensor.itemsize])[::step]
