"""Detects parameters that were replaced, added or unfrozen after the model was prepared: their gradients would not be summed."""

from typing import NamedTuple

import torch
from torch import nn

from rankloom.base.errors import ConfigError, UnitError
from rankloom.base.names import full_name

LOAD = "Load values with `load_full_state_dict` of the engine (in a loop of your own: with `load_state_dict` of the wrapped model)"


class KnownParameter(NamedTuple):
    """A parameter as it was when the model was prepared: `holder[key] is param`."""

    holder: dict[str, nn.Parameter | None]   # of its module: `module._parameters`
    key: str
    name: str                                # in the whole model
    param: nn.Parameter
    trained: bool

    @property
    def is_gone(self) -> bool:
        """Whether it is not there any more."""
        return self.holder.get(self.key) is not self.param


class KnownModule(NamedTuple):
    """A module as it was, with its children and how many parameters of its own it had."""

    module: nn.Module
    children: list[nn.Module | None]
    parameters: int

    @classmethod
    def of(cls, module: nn.Module) -> "KnownModule":
        """The module as it is now."""
        return cls(module, list(module._modules.values()), len(module._parameters))


class KnownParameters:
    """A record of a model's modules and parameters, and of which parameters are frozen."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._known = self._all_parameters()
        self._modules = [KnownModule.of(module) for module in model.modules()]

    def expect_unchanged(self, *, may_move: bool = False) -> None:
        """Before a step: raise UnitError when a parameter was replaced or added, ConfigError when a frozen one is now trainable.

        may_move: it may have another name now, as `torch.nn.utils.prune` gives it
        """
        self.expect_no_more()
        if may_move and any(known.is_gone for known in self._known):
            self._follow()
        with torch._C.DisableTorchFunctionSubclass():   # released parameters have a class of their own, which looks at every call
            unfrozen = [known.name for known in self._known if not known.trained and known.param.requires_grad]
        if replaced := [known.name for known in self._known if known.is_gone]:
            raise UnitError(f"{replaced[0]} was replaced after the model was prepared: the gradient of the new tensor is not summed. "
                            f"{LOAD}, or replace it before")
        if unfrozen:
            raise ConfigError(f"{unfrozen[0]} was frozen when the model was prepared, and is trainable now: its gradient would not be "
                              "summed. Unfreeze what will be trained before you prepare the model, and freeze parts of it afterwards")

    def expect_no_more(self) -> None:
        """Raise UnitError when a parameter was added, by itself or in a new module."""
        if all(list(module._modules.values()) == children and len(module._parameters) == count
               for module, children, count in self._modules):
            return
        self._expect_known()
        self._modules = [KnownModule.of(module) for module in self.model.modules()]

    def _expect_known(self) -> None:
        known = {each.param for each in self._known}
        if new := [name for name, param in self.model.named_parameters() if param not in known]:
            raise UnitError(f"{new[0]} came after the model was prepared: its gradient is not summed, and it is in no saved state. "
                            "Prepare the model with all its parts")

    def _follow(self) -> None:
        """Where parameters have moved, and none is gone or new: note their new places."""
        if {known.param for known in self._known} - {*self.model.parameters()}:
            return
        self._expect_known()
        trained = {known.param: known.trained for known in self._known}
        self._known = [found._replace(trained=trained[found.param]) for found in self._all_parameters()]

    def _all_parameters(self) -> list[KnownParameter]:
        """Those that the model has now, a tied one once for each place where it is."""
        return [KnownParameter(module._parameters, key, full_name(prefix, key), param, param.requires_grad)
                for prefix, module in self.model.named_modules() for key, param in module._parameters.items() if param is not None]


def expect_none_beside(wrapper: nn.Module) -> None:
    """Raise UnitError when a wrapper around `module` was given parameters to train beside it, as `wrapper.head = nn.Linear(...)` does."""
    if len(wrapper._modules) == 1 and not wrapper._parameters:
        return
    beside = dict(wrapper._parameters)
    for key, part in wrapper._modules.items():
        if part is not None and key != "module":
            beside |= {full_name(key, name): param for name, param in part.named_parameters()}
    if new := [name for name, param in beside.items() if param is not None and param.requires_grad]:
        raise UnitError(f"{new[0]} came after the model was wrapped, and stands beside it: its gradient is not summed, and it is in no "
                        "saved state. Put it into the model before you wrap it; keep elsewhere what is not to be trained, or freeze it")
