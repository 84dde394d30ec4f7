"""Which dropouts run between column-cut and row-cut layers, where ranks have different features or heads.

Neither the plan nor shapes say it. So hooks on these layers note it while the module runs. Keyed dropout (train/dropout.py) reads the note;
torch's own does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rankloom.base.names import is_inside
from rankloom.world.group import Group


@dataclass(slots=True)
class CutRegion:
    """Whether a module's forward is now between its column-cut and its row-cut layers, where ranks have different features or heads.

    heads: query heads of this rank, if it is attention
    """

    rank: int
    heads: int
    is_cut: bool = False

    def leave(self, *_: Any) -> None:
        """From here on activations are whole."""
        self.is_cut = False

    def enter(self, *_: Any) -> None:
        """From here on they are cut."""
        self.is_cut = True


def watch_dropout(model: nn.Module, columns: list[str], rows: list[str], heads: Mapping[str, int], group: Group) -> None:
    """Give a `CutRegion` to every `nn.Dropout` inside a module that has column-cut and row-cut layers; its p may be raised from 0 later.

    columns, rows: names of these layers
    heads:         attention module -> query heads of this rank
    """
    known: dict[str, CutRegion] = {}
    for name, module in model.named_modules():
        owner = _owner(name, columns, rows) if type(module) is nn.Dropout and group.size > 1 else None
        if owner is None:
            continue
        if owner not in known:
            known[owner] = CutRegion(group.rank, heads.get(owner, 0))
            model.get_submodule(owner).register_forward_pre_hook(known[owner].leave)
            for column in _inside(owner, columns):
                model.get_submodule(column).register_forward_hook(known[owner].enter)
            for row in _inside(owner, rows):
                model.get_submodule(row).register_forward_pre_hook(known[owner].leave)
        vars(module)["cut_region"] = known[owner]


def _owner(name: str, columns: list[str], rows: list[str]) -> str | None:
    """The innermost module around `name` that has layers of both kinds."""
    while name:
        name = name.rpartition(".")[0]
        if _inside(name, columns) and _inside(name, rows):
            return name
    return None


def _inside(owner: str, names: list[str]) -> list[str]:
    return [name for name in names if is_inside(name, owner)]
