"""Delayed scaling: tensors of this step are cast with the largest magnitudes of earlier steps.

Then a tensor need not be read twice, to find its scale and to cast it. The price is state that affects the numbers: a table
[steps, tensors], by name. It is no buffer of the model, which does not need it outside of training. `Engine.full_state_dict` has it, like
the loss scale, so that a resumed run continues with the same bits. Without it the first step scales by its own magnitudes, like a new run.

A step reads only what was known when it began, so accumulation, recompute and the order of layers change nothing. At its end one message
for all layers takes the maximum over ranks, so that scales do not depend on how rows are dealt to ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rankloom.base.errors import ConfigError
from rankloom.world.group import Group


@dataclass(slots=True)
class Meter:
    """One tensor's numbers. They are separate tensors, because compiled code loses writes to parts of a common one.

    seen:  [1, 1] fp32, the largest magnitude so far in this step
    known: [1, 1] fp32, what this step scales by; valid if `ready`, after a step that has seen the tensor
    """

    seen: Tensor
    known: Tensor
    ready: bool = False

    def read(self, largest: Tensor) -> Tensor | None:
        """Record a magnitude [1, 1]; returns the one to scale by. Recording it again, as recompute does, changes nothing."""
        self.seen.copy_(torch.maximum(self.seen, largest))
        return self.known if self.ready else None


class AmaxHistory:
    """The largest magnitudes of `length` steps: a meter for each name.

    rows:      [length, n] fp32, newest first
    elsewhere: group of the ranks that have other parts of the same tensors, or other layers
    """

    def __init__(self, names: Sequence[str], length: int, device: torch.device, elsewhere: Group | None = None):
        self.elsewhere = elsewhere
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        self.meters = {name: Meter(zeros(1, 1), zeros(1, 1)) for name in names}
        self.rows = zeros(length, len(self.meters))

    def close_step(self, group: Group) -> None:
        """At the end of a step: take the maxima over ranks as the newest row, and drop the oldest. A tensor that was not seen, or was not
        finite, keeps its magnitude.

        sent: one all-reduce of n numbers, and one over `elsewhere`
        """
        seen = group.all_reduce(_line_up([meter.seen for meter in self.meters.values()]), "max", label="amax of all layers")
        if self.elsewhere:
            seen = self.elsewhere.all_reduce(seen, "max", label="amax of all layers, elsewhere")
        known = _line_up([meter.known for meter in self.meters.values()])
        newest = torch.where(seen.isfinite() & (seen > 0), seen, known)
        self._go_on(torch.cat((newest[None], self.rows[:-1])))

    def abandon_step(self) -> None:
        """After a failed step: forget what it saw."""
        torch._foreach_zero_([meter.seen for meter in self.meters.values()])

    def state_dict(self) -> dict[str, Tensor]:
        """name -> [length] magnitudes, newest first, in CPU memory."""
        return {name: column.clone() for name, column in zip(self.meters, self.rows.t().cpu())}

    def misfit(self, state: Mapping[str, Tensor]) -> str | None:
        """Why a saved history cannot be loaded, or None."""
        if set(state) == set(self.meters):
            return None
        odd = sorted(set(state) ^ set(self.meters))
        return (f"the saved amax history has {len(state)} tensors, this model casts {len(self.meters)}; "
                f"only one of the two knows {odd[0]!r}. Was it saved with other layers in fp8?")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue with a saved history: a longer one is cut, a shorter one padded with zeros; an empty one is that of a new run.

        raises: ConfigError when the names are not these
        """
        if state and (problem := self.misfit(state)):
            raise ConfigError(problem)
        saved = torch.stack([state[name] for name in self.meters], dim=1).to(self.rows)[: len(self.rows)] if state else self.rows[:0]
        for meter in self.meters.values():
            meter.ready = False
        self._go_on(torch.cat((saved, torch.zeros_like(self.rows)[len(saved):])))

    def _go_on(self, rows: Tensor) -> None:
        self.rows = rows
        largest = rows.amax(0)
        meters = list(self.meters.values())
        torch._foreach_copy_([meter.known for meter in meters], list(largest.view(-1, 1, 1).unbind()))
        self.abandon_step()
        if not all(meter.ready for meter in meters):   # waits for the device, until every tensor has been seen
            for meter, seen in zip(meters, (largest > 0).tolist()):
                meter.ready = seen


def _line_up(numbers: list[Tensor]) -> Tensor:
    return torch.cat(numbers).view(-1)
