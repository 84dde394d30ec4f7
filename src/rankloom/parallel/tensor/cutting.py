"""A model that is being cut over ranks, and one module of it: what the words of a plan (styles.py) work on."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from rankloom.base.errors import ConfigError
from rankloom.base.hooks import copy_user_attributes, hooks_of, is_hooked
from rankloom.base.layout import Layout
from rankloom.parallel.tensor.heads import HeadCount, tell_local_counts
from rankloom.parallel.tensor.holding import Holding, hold
from rankloom.parallel.tensor.moves import BY_TOKENS, WHOLE, Entrance
from rankloom.parallel.tensor.overlap import OverlappedEntrance
from rankloom.parallel.tensor.tags import Ends, declare
from rankloom.world.group import Group


class Cut(NamedTuple):
    """A parameter that was cut, which stays alive as long as its id is a key, and this rank's part of it."""

    whole: nn.Parameter
    part: nn.Parameter
    holding: Holding


@dataclass
class Cutting:
    """A model that is being cut: what the steps of the cut share."""

    model: nn.Module
    group: Group
    words: dict[str, str]              # module name -> word
    features: dict[str, int]           # of the linear layers that are cut by output features, before the cut
    pieces: int = 1                    # of a row-cut product (`overlap`)
    cuts: dict[int, Cut] = field(default_factory=dict)                  # id of the whole parameter -> how it was cut: ties are kept
    entrances: dict[str, Entrance] = field(default_factory=dict)        # module -> that of its column-cut layers
    heads: dict[str, list[HeadCount]] = field(default_factory=dict)     # attention -> of queries, keys, values

    @property
    def sequence(self) -> bool:
        """Whether activations between the split layers are cut by tokens."""
        return bool({"sequence_parallel", "sequence_parallel_rep"} & set(self.words.values()))

    @property
    def stream(self) -> Layout:
        """The layout of activations between the split layers."""
        return BY_TOKENS if self.sequence else WHOLE

    def words_in(self, parent: str) -> dict[str, str]:
        """The words of the modules that stand directly in this one."""
        return {name: word for name, word in self.words.items() if name.rpartition(".")[0] == parent}

    def cut(self, source: nn.Module, name: str, holding: Holding) -> nn.Parameter:
        """This rank's part of a parameter; a tied one is cut once, and shared again."""
        param = getattr(source, name)
        if not isinstance(param, nn.Parameter):
            raise ConfigError(f"{self._place_of(source)}: its {name} is computed from other parameters (weight_norm, a parametrization), "
                              "and they would be lost; make it a parameter again, or leave it out of the plan")
        if (before := self.cuts.get(id(param))) is not None:
            if before.holding != holding:
                raise ConfigError(f"a tied parameter of shape {tuple(param.shape)} would be cut in two ways, along dims "
                                  f"{before.holding.dim} and {holding.dim}; give its owners embedding_rowwise and colwise_rep")
            return before.part
        if is_hooked(param):
            raise ConfigError(f"{self._place_of(source)}: its {name} has hooks, which would be lost: each rank gets a part; put them on "
                              "that afterwards")
        part = nn.Parameter(holding.cut(param.detach(), self.group.rank), requires_grad=param.requires_grad)
        copy_user_attributes(part, param)
        self.cuts[id(param)] = Cut(param, part, holding)
        return part

    def _place_of(self, source: nn.Module) -> str:
        return next(place for place, module in self.model.named_modules() if module is source)

    def entrance(self, parent: str) -> Entrance | None:
        """The common entrance of the column-cut layers of one module; None with sequence parallel."""
        if self.sequence:
            return None
        if parent not in self.entrances:
            module = self.model.get_submodule(parent)
            kind = OverlappedEntrance if self.pieces > 1 else Entrance
            self.entrances[parent] = kind(self.group, f"entrance of {parent or 'the model'}").ends_with(module)
        return self.entrances[parent]

    def expect_ties(self) -> None:
        """After all cuts: raise ConfigError where a parameter that was cut is still whole in a module that is tied to it."""
        for name, param in self.model.named_parameters():
            if id(param) in self.cuts:
                raise ConfigError(f"{name} is tied to a parameter that the plan cuts, and would stay whole, a parameter of its own; "
                                  "name its module in the plan too, or delete that name of it first, if no forward reads it there")

    def tell_attention(self) -> None:
        """After all cuts: set the counts of heads in attention modules to those of this rank."""
        for name, local in self.heads.items():
            tell_local_counts(self.model.get_submodule(name), name, local)


@dataclass(frozen=True, slots=True)
class Site:
    """One module that the plan names."""

    cutting: Cutting
    name: str

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self.cutting.model.get_submodule(self.name)

    @property
    def parent(self) -> str:
        """The name of the module it is in."""
        return self.name.rpartition(".")[0]

    @property
    def group(self) -> Group:
        """The ranks that the model is cut over."""
        return self.cutting.group

    def replace(self, new: nn.Module, held: dict[str, Holding], ends: Ends) -> None:
        """Put `new` in the module's place, under the same name.

        raises: ConfigError when users have put hooks, or another forward, on the module
        """
        found = "hooks" if any(hooks_of(self.module).values()) else "a forward of its own" if "forward" in vars(self.module) else None
        if found:   # not kept: they expect whole tensors
            raise ConfigError(f"{self.name} has {found}, which would be lost: each rank gets a part; put that on the part afterwards")
        declare(new, ends)
        for name, holding in held.items():
            hold(new, name, holding)
        new.train(self.module.training)
        setattr(self.cutting.model.get_submodule(self.parent), self.name.rpartition(".")[2], new)

    def parts(self, held: dict[str, Holding]) -> tuple[nn.Parameter, nn.Parameter | None]:
        """This rank's part of weight and bias."""
        weight = self.cutting.cut(self.module, "weight", held["weight"])
        return weight, self.cutting.cut(self.module, "bias", held["bias"]) if "bias" in held else None
