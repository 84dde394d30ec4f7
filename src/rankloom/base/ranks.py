"""What one rank of a mesh holds and is given, as values that can be compared, printed and drawn. `train/run/paper.py` makes them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rankloom.base.layout import Span


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """What a rank holds of one parameter.

    whole: its shape in the plain model
    spans: for each dim, the elements that are here; more than one span where matrices are fused
    local: the shape of what is here: longer than the spans where the rest is padding
    owned: which elements of that, flattened, the rank's optimizer updates: from, to

    >>> half = ParameterPart("up", (6, 2), ((Span(3, 6),), (Span(0, 2),)), (3, 2), (0, 4))
    >>> half.elements, half.cut_dims
    (6, (0,))
    """

    name: str
    whole: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    local: tuple[int, ...]
    owned: tuple[int, int]

    @property
    def elements(self) -> int:
        """How many are here while the rank computes, padding included."""
        return prod(self.local)

    @property
    def cut_dims(self) -> tuple[int, ...]:
        """The dims of which not all elements are here."""
        return tuple(dim for dim, (spans, length) in enumerate(zip(self.spans, self.whole)) if spans != (Span(0, length),))


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank.

    stages: of the pipeline; (0,) where there is none
    rows:   of the global batch
    tokens: of each row, the positions
    held:   bytes between two steps, by kind: parameters, gathered, gradients, optimizer
    """

    rank: int
    coords: Mapping[str, int]
    stages: tuple[int, ...]
    parameters: tuple[ParameterPart, ...]
    rows: range
    tokens: tuple[range, ...]
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.held.values())


def modules_of(part: RankPart) -> list[str]:
    """The blocks and the other modules of which a rank holds a part, in the order of the model."""
    return list(dict.fromkeys(_module_of(parameter.name) for parameter in part.parameters))


def _module_of(name: str) -> str:
    """`blocks.3.mlp.up.weight` -> `blocks.3`; `head.weight` -> `head`."""
    words = name.split(".")
    number = next((at for at, word in enumerate(words) if word.isdigit()), None)
    return ".".join(words[:-1] if number is None else words[:number + 1])


def kind_of(name: str) -> str:
    """The name that a parameter of every block has in common.

    >>> kind_of("blocks.3.mlp.up.weight")
    'blocks.*.mlp.up.weight'
    """
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def say_modules(modules: Iterable[str]) -> str:
    """The names of modules, with runs of blocks shortened.

    >>> say_modules(["embedding", "blocks.0", "blocks.1", "blocks.2", "norm"])
    'embedding, blocks 0-2, norm'
    """
    words: list[str] = []   # modules, and the lists of blocks
    runs: dict[str, list[int]] = {}
    for module in modules:
        parent, _, last = module.rpartition(".")
        if not last.isdigit():
            words.append(module)
        elif parent in runs:
            runs[parent].append(int(last))
        else:
            runs[parent] = [int(last)]
            words.append(parent)
    return ", ".join(f"{word} {say_numbers(runs[word])}" if word in runs else word for word in words)


def say_numbers(numbers: Sequence[int]) -> str:
    """Rising numbers, those in a row as first-last, or first-last/step where they are evenly apart.

    >>> say_numbers([0, 1, 2, 5]), say_numbers([1, 3, 5, 7]), say_numbers([0, 4])
    ('0-2, 5', '1-7/2', '0, 4')
    """
    step = numbers[1] - numbers[0] if len(numbers) > 2 else 1
    if step > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"{numbers[0]}-{numbers[-1]}/{step}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def experts_of(part: RankPart) -> tuple[range, int] | None:
    """The routed experts that are here, and how many a layer has in all; None for a dense model, or a stage without a block."""
    found = next((parameter for parameter in part.parameters if ".experts." in parameter.name), None)
    return None if found is None else (range(*found.spans[0][0]), found.whole[0])
