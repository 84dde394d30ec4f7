"""Which parameters are gathered together: a model is cut into sections, modules whose parameters are gathered when they are called.

By default each repeated block of a model is a section, and the rest (embedding, last norm, head) belongs to the root. A parameter
belongs to the innermost section that contains every module using it; so a weight tied across two blocks belongs to the root.
Decisions only: no tensor is touched here.
"""

import dataclasses
import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError
from rankloom.base.names import full_name

AUTO = "auto"
Policy = str | int | type | tuple[type, ...] | Callable[[str, nn.Module], bool] | Callable[[nn.Module], bool]
ROOT = ""
# Modules that are never called: containers, and the output layer of torch's attention, which only reads its weight.
NEVER_CALLED = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict | nn.modules.linear.NonDynamicallyQuantizableLinear
CALLS_AS_NEEDED = nn.AdaptiveLogSoftmaxWithLoss   # calls what is in its list only if some row needs it, which ranks decide apart
_WITHOUT_TENSORS = nn.Module | type | str | bytes | int | float | complex | torch.dtype | torch.device | FunctionType | ModuleType | None


def comparable(policy: Policy) -> Any:
    """The policy, as ranks can compare it: functions of several ranks are different objects, even if they do the same."""
    return policy if isinstance(policy, str | int | type | tuple) else "a function"


def expect_policy(policy: Any) -> None:
    """Raise ConfigError for what is no `Policy`."""
    if isinstance(policy, bool | str):
        is_one = policy == AUTO
    elif isinstance(policy, tuple):
        is_one = all(isinstance(kind, type) for kind in policy)
    else:
        is_one = isinstance(policy, int | type) or callable(policy)
    if not is_one:
        raise ConfigError(f"units={policy!r} is no way to cut a model: give 'auto', a module class or a tuple of them, a number of "
                          "parameters, or a function")


def section_names(model: nn.Module, policy: Policy = AUTO) -> list[str]:
    """Full names of the modules that are sections, the root ("") first, then in the order of the model.

    policy: "auto": the repeated blocks. One or several classes: modules of these. A number: modules with at least that many parameters
            outside inner sections; all but parts of an adaptive softmax, which ranks call apart; none if the model has fewer. A function
            of (name, module), or of the module alone: modules for which it returns true
    raises: ConfigError when classes or a function find no module, or for what is not a policy
    """
    expect_policy(policy)
    named = dict(model.named_modules())
    if policy == AUTO:
        blocks = set(repeated_blocks(model))
        found = [name for name in named if name in blocks]
    elif isinstance(policy, int):
        found = _by_size(model, policy)
    elif isinstance(policy, type | tuple):
        found = [name for name, module in named.items() if isinstance(module, policy)]
    else:
        found = _by_function(named, policy)
    if isinstance(policy, str | int | type | tuple):   # a function says what it wants
        as_needed = tuple(f"{name}." if name else "" for name, module in named.items() if isinstance(module, CALLS_AS_NEEDED))
        found = [name for name in found if not name.startswith(as_needed)]
    found = [name for name in found if not isinstance(named[name], NEVER_CALLED)]   # never called, so never gathered
    if not found and policy != AUTO and not isinstance(policy, int):   # a small model is one unit
        kinds = sorted({type(module).__name__ for module in named.values()})
        raise ConfigError(f"units={policy!r} finds no module in this model, which has {', '.join(kinds)}")
    return [ROOT, *(name for name in found if name != ROOT and has_parameters(named[name]))]


def _by_function(named: Mapping[str, nn.Module], asks: Any) -> list[str]:
    wanted = [one for one in inspect.signature(asks).parameters.values() if one.default is one.empty]
    alone = len(wanted) == 1 and wanted[0].kind is not inspect.Parameter.VAR_POSITIONAL
    return [name for name, module in named.items() if (asks(module) if alone else asks(name, module))]


def repeated_blocks(model: nn.Module) -> Iterator[str]:
    """Names of the outermost modules that are in a list with others of their class, and may be called."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, CALLS_AS_NEEDED):
            inside += (f"{name}." if name else "",)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not f"{name}.".startswith(inside):
            kinds = Counter(type(child) for child in module)
            blocks = [full_name(name, key) for key, child in module.named_children() if kinds[type(child)] > 1 and may_be_a_block(child)]
            inside += tuple(f"{block}." for block in blocks)
            yield from blocks


def may_be_a_block(module: nn.Module) -> bool:
    """Whether a module has modules inside, and a forward. An `nn.ModuleDict` has none: its owner calls what is in it, and never it."""
    return has_forward(module) and next(module.children(), None) is not None


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def parameters_of_sections(model: nn.Module, sections: Iterable[str]) -> dict[str, list[str]]:
    """Section -> names of its parameters; each parameter once, under its first name. Sections without parameters are left out."""
    known = set(sections)
    names = {id(param): name for name, param in model.named_parameters()}
    homes: dict[str, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for param in (*module.parameters(recurse=False), *read_by(module)):
            chain, name = _chain(prefix, known), names[id(param)]
            homes[name] = _common(homes[name], chain) if name in homes else chain
    result: dict[str, list[str]] = {section: [] for section in sections}
    for name, chain in homes.items():
        result[chain[-1]].append(name)
    return {section: members for section, members in result.items() if members}


def read_by(module: nn.Module) -> Iterable[Tensor]:
    """Parameters of modules inside it that a module's own forward reads, if it says so, as rankloom's GPT does."""
    says = getattr(module, "parameters_read_by_forward", None)
    return () if says is None else says()   # type: ignore[no-any-return]


def _chain(prefix: str, known: set[str]) -> list[str]:
    """The sections that contain module `prefix`, outermost first."""
    parts = prefix.split(".") if prefix else []
    paths = [".".join(parts[:n]) for n in range(len(parts) + 1)]
    return [path for path in paths if path in known]


def _common(one: list[str], other: list[str]) -> list[str]:
    same = [a for a, b in zip(one, other) if a == b]
    return same or [ROOT]


def _by_size(model: nn.Module, least: int) -> list[str]:
    """From the inside out: a module is a section when it holds at least `least` parameters outside inner sections."""
    if least < 1:
        raise ConfigError(f"units={least}, expected a number of parameters, 1 or more")
    found: set[str] = set()

    def visit(name: str, module: nn.Module) -> int:
        left = sum(param.numel() for param in module.parameters(recurse=False))
        left += sum(visit(full_name(name, key), child) for key, child in module.named_children())
        if left < least or isinstance(module, NEVER_CALLED):
            return left
        found.add(name)
        return 0

    visit(ROOT, model)
    return [name for name, _ in model.named_modules() if name in found]


def has_parameters(module: nn.Module) -> bool:
    """Whether it, or a module in it, has a parameter."""
    return next(module.parameters(), None) is not None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in an output: nested in containers and dataclasses, and results of operations in attributes of other objects.

    Such objects are those of `torch.distributions`, for example. What else they refer to (parameters, a vocabulary) was not returned.
    """
    if isinstance(value, Tensor):
        yield value
    elif (parts := _returned_parts(value)) is not None:
        for part in parts:
            yield from tensors_in(part)
    else:
        yield from _results_in(value, set())


def _results_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Results of operations in the attributes of an object, and of objects there; lists and tuples of them too."""
    if isinstance(value, _WITHOUT_TENSORS) or id(value) in seen:
        return
    seen.add(id(value))
    for part in value if isinstance(value, list | tuple) else _attributes(value):
        if isinstance(part, Tensor):
            if part.grad_fn is not None:
                yield part
        elif not isinstance(part, _WITHOUT_TENSORS | Mapping):
            yield from _results_in(part, seen)


def _returned_parts(value: Any) -> Iterable[Any] | None:
    """What is in a container or a dataclass; None for other values."""
    if isinstance(value, Mapping):   # so are the dataclasses of `transformers`
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)]   # one may be unset
    return None


def _attributes(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if hasattr(value, mangled):
                yield getattr(value, mangled)
