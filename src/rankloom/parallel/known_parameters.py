"""The parameters of a prepared model stay the ones that were prepared: no rank sums the gradient of one that is put in, added or thawed
later.
"""

from torch import nn

from rankloom.base.errors import ConfigError, UnitError

LOAD = "Load values with `load_full_state_dict` of the engine (`load_state_dict` of what is wrapped, in a loop of one's own)"


class KnownParameters:
    """The modules and parameters that a model has when this is made, and which of them are frozen."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._places = [(module._parameters, key, f"{prefix}.{key}" if prefix else key, param, param.requires_grad)
                        for prefix, module in model.named_modules() for key, param in module._parameters.items() if param is not None]
        self._parts = self._all_parts()

    def expect_unchanged(self) -> None:
        """Before a step: raise UnitError when another parameter is in the place of one, or one has come; ConfigError when one is frozen
        no more."""
        self.expect_no_more()
        for place, key, name, param, trained in self._places:
            if place.get(key) is not param:
                raise UnitError(f"{name} was replaced after the model was prepared: nobody sums the gradient of the new tensor. "
                                f"{LOAD}, or replace it before")
            if param.requires_grad and not trained:
                raise ConfigError(f"{name} was frozen when the model was prepared, and is to be trained now: its gradient would be summed "
                                  "by nobody. Prepare the model with all that will be trained, and freeze parts of it afterwards")

    def expect_no_more(self) -> None:
        """Raise UnitError when a parameter has come that was not there before, alone or in a module that is new."""
        if all(list(module._modules.values()) == parts and len(module._parameters) == size for module, parts, size in self._parts):
            return
        known = {param for *_, param, _ in self._places}
        if new := [name for name, param in self.model.named_parameters() if param not in known]:
            raise UnitError(f"{new[0]} came after the model was prepared: nobody sums its gradient, and no state holds it. Prepare the "
                            "model with all its parts")
        self._parts = self._all_parts()

    def _all_parts(self) -> list[tuple[nn.Module, list[nn.Module | None], int]]:
        """Each module, what is in it, and how many parameters it has."""
        return [(module, list(module._modules.values()), len(module._parameters)) for module in self.model.modules()]
