"""`rl.Pipe`: where to cut a model into stages, and which loss the last one computes; what is left out follows from the model.

A loss for one process, `loss(model, micro-batch)`, runs unchanged on the last stage. It gets a stand-in for the model, whose call
returns the output of the last piece; for our GPT, whose last piece ends before the output matrix, what follows from it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from rankloom.base.errors import ConfigError, LossError
from rankloom.base.expect import expect_callable, expect_type
from rankloom.base.nested import cast_floats_in
from rankloom.models.gpt import GPT
from rankloom.models.pieces import BeforeOutput, gpt_answer, gpt_pieces
from rankloom.parallel.data import embeddings
from rankloom.parallel.expert import expert_layers
from rankloom.parallel.pipeline.cut import Piece, balance, multiplied_parameters, sequential_pieces
from rankloom.parallel.pipeline.measure import expect_example
from rankloom.parallel.pipeline.runtime import Loss
from rankloom.train.dropout import Keyed
from rankloom.train.pipeline.layer_pieces import layer_pieces, positional
from rankloom.train.pipeline.trial import ADVICE
from rankloom.train.precision import Precision

WholeLoss = Callable[[Any, Any], tuple[Tensor, Any]]   # loss(model, micro-batch) -> (sum, count)


@dataclass(frozen=True, slots=True)
class Pipe:
    """How a model becomes a pipeline.

    pieces:   model -> its pieces, in order (parallel/pipeline/cut.py). If it has parameters `part` (as `gpt_pieces`), `inputs` or
              `example` (as `layer_pieces`), it is given these too. None: `gpt_pieces` for our GPT, `sequential_pieces` for an
              `nn.Sequential`, else `layer_pieces` (train/pipeline/layer_pieces.py)
    loss:     model -> loss(output of the last piece, second part of a micro-batch) -> (sum, count). None: the loss of one process, on
              a stand-in for the model
    schedule: a name of `rankloom schedule list`
    chunks:   stages on each rank; None: as few as the schedule allows
    sizes:    how many pieces each stage gets; None: as `example` says; without one, stages of a language model multiply with equally
              many parameters, and those of other models have equally many pieces
    example:  a micro-batch, as one rank has it, to measure the pieces with before training, for stages that take equally long; a rank
              must have memory for a forward and backward of the whole model. `layer_pieces` tries the model with it, too: models that
              are not called with tokens need one
    memory:   with an example: the most bytes a stage may hold of parameters and of what a micro-batch leaves for its backward
    """

    pieces: Callable[..., Sequence[Piece]] | None = None
    loss: Callable[[Any], Loss] | None = None
    schedule: str = "1f1b"
    chunks: int | None = None
    sizes: Sequence[int] | None = None
    example: tuple[Any, Any] | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        for name, function in (("pieces", self.pieces), ("loss", self.loss)):
            if function is not None:
                expect_callable(f"pipe=rl.Pipe({name}=...): {name}", function, "a function of the model")
        if self.sizes is not None and not (isinstance(self.sizes, Sequence) and all(isinstance(size, Integral) for size in self.sizes)):
            raise ConfigError(f"pipe=rl.Pipe(sizes={self.sizes!r}): expected how many pieces each stage gets, as a list such as [3, 4, 2]")
        if self.sizes is not None and self.example is not None:
            raise ConfigError("rl.Pipe: sizes and example both say where to cut; leave one of them out")
        expect_type("pipe=rl.Pipe(memory=...): memory", self.memory, (Real, type(None)), "a number of bytes")
        expect_example(self.example, self.memory, "rl.Pipe: ")

    @classmethod
    def of(cls, asked: "Pipe | str | None", model: nn.Module, loss: WholeLoss, precision: Precision) -> "ChosenPipe":
        """Fill in what was left out.

        asked: a `Pipe`, or the name of a schedule
        model: whole, before it is split over other axes
        loss:  that of one process
        """
        pipe = asked if isinstance(asked, Pipe) else cls() if asked is None else cls(schedule=asked)
        pieces = pipe.pieces or _pieces_of_a(model)

        def loss_of(model: Any) -> Loss:
            if pipe.loss is not None:
                of_targets = pipe.loss(model)
                expect_callable("pipe=rl.Pipe(loss=...): what it returns", of_targets, "a function of the output and the targets")
                return partial(_in_format, lambda output, microbatch: of_targets(output, microbatch[1]), precision)
            names = positional(model) if pieces is layer_pieces else []
            plain = partial(_ModelStandIn, names, pieces is sequential_pieces)
            stand_in = partial(_GPTStandIn, gpt_answer(model), precision) if pieces is gpt_pieces else plain
            return partial(_in_format, partial(_run_whole_loss, loss, partial(stand_in, getattr(model, "config", None))), precision)

        example = pipe.example
        if example is not None and precision.compute is not None and precision.master is None:   # as the model itself (prepare.py)
            example = (cast_floats_in(example[0], precision.compute), example[1])
        return ChosenPipe(
            pieces, loss_of, pipe.schedule, pipe.chunks, pipe.sizes, example, pipe.memory, tables=embeddings(model),
            numels={name: param.numel() for name, param in model.named_parameters(remove_duplicate=False)})


def _pieces_of_a(model: nn.Module) -> Callable[..., Sequence[Piece]]:
    if "forward" in vars(model):
        raise ConfigError("the model has a forward of its own (model.forward = ...), and no rank of a pipeline calls it: make it that of a "
                          f"class, or {ADVICE}")
    if isinstance(model, GPT) and type(model).forward is GPT.forward and type(model).hidden is GPT.hidden and "hidden" not in vars(model):
        return gpt_pieces
    return sequential_pieces if type(model).forward is nn.Sequential.forward else layer_pieces


def without_functions(asked: Pipe | str | None) -> Any:
    """What ranks must have been given alike of a `pipe`: all but its functions, and the values of its example."""
    return (asked.schedule, asked.chunks, asked.sizes, asked.memory, asked.example is not None) if isinstance(asked, Pipe) else asked


@dataclass(frozen=True, slots=True)
class ChosenPipe:
    """A `Pipe` for one model.

    loss:    model -> loss(output of the last piece, whole micro-batch) -> (sum, count)
    numels:  how many elements each parameter of the model has
    tables:  the parameters of embeddings
    """

    pieces: Callable[..., Sequence[Piece]]
    loss: Callable[[Any], Loss]
    schedule: str
    chunks: int | None
    sizes: Sequence[int] | None
    example: tuple[Any, Any] | None
    memory: float | None
    numels: Mapping[str, int]
    tables: frozenset[str]

    def cut(self, pieces: Sequence[Piece], stages: int) -> list[int]:
        """How many pieces each stage gets: see `sizes` of `Pipe`. raises: ConfigError"""
        if self.sizes is None:
            return balance(multiplied_parameters(pieces, self.numels, self.tables), stages)
        if len(self.sizes) != stages or sum(self.sizes) != len(pieces) or min(self.sizes) < 1:
            raise ConfigError(f"pipe=rl.Pipe(sizes={list(self.sizes)}): expected {stages} numbers of 1 or more, whose sum is "
                              f"{len(pieces)}: so many pieces has the model, and {stages} stages has the schedule {self.schedule!r}")
        return list(self.sizes)


def _in_format(loss: Loss, precision: Precision, output: Any, microbatch: tuple[Any, Any]) -> tuple[Tensor, Any]:
    """The loss of the model's output, cast to the output format."""
    return loss(output if isinstance(output, BeforeOutput) else cast_floats_in(output, precision.output), microbatch)


class _ModelStandIn:
    """Stands in for the model in a loss of one process: its call returns the output of the last piece for this micro-batch.

    Of the model's attributes it has only `config`, the same object; a copied number would stay as it was when the model was cut.
    names:  of the model's positional parameters, where stages call the model with the first part of the micro-batch
    as_one: whether several tensors are one argument, as between the modules of a sequence
    """

    def __init__(self, names: Sequence[str], as_one: bool, config: Any, inputs: Any, output: Any):
        self.names = names
        if config is not None:
            self.config = config
        several = isinstance(inputs, tuple | list) and not (as_one and len(inputs) > 1)
        self.expected = list(inputs) if several else [inputs]
        self.output, self.calls = output, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns that output. raises: LossError unless called with the very tensors that the first stage got, as the same parameters"""
        asked = [*args, *kwargs.values()]
        if len(asked) != len(self.expected) or any(a is not b for a, b in zip(asked, self.expected)):
            names = ", ".join([type(value).__name__ for value in args] + [f"{name}=" for name in kwargs])
            raise LossError(f"the loss calls the model with ({names}), but a pipeline has called it with the first part of the micro-batch "
                            f"({len(self.expected)} tensors) and nothing else. Call it with just these, and compute the loss from what it "
                            "returns; what else the model needs belongs in that part")
        for name, position in zip(kwargs, self.names[len(args):]):
            if name != position:   # the stages have computed with it as that parameter
                raise LossError(f"the loss gives the model a tensor as `{name}`, but a pipeline calls it with the first part of the "
                                f"micro-batch by position, so it was `{position}`. Give the model a forward that takes these tensors in "
                                "this order")
        self.calls += 1
        return self.output

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the loss asks the model for {name!r}, but no rank of a pipeline has the model; it can only be "
                             "called, and asked for its `config`, if it has one")


class _GPTStandIn(_ModelStandIn):
    """Stands in for our GPT: its call returns logits, or with targets (sum, count), of the `BeforeOutput` of the last piece.

    answer: see `gpt_answer`
    """

    def __init__(self, answer: Callable[..., Any], precision: Precision, *whose: Any):
        super().__init__([], False, *whose)
        self.answer, self.precision = answer, precision

    def __call__(self, tokens: Tensor, targets: Tensor | None = None, **others: Any) -> Any:
        """As GPT.forward. others: documents, where rows are packed"""
        return cast_floats_in(self.answer(super().__call__(tokens, **others), targets), self.precision.output)


def _run_whole_loss(loss: WholeLoss, stand_in: Callable[[Any, Any], _ModelStandIn], output: Any, microbatch: tuple[Any, Any]
                    ) -> tuple[Tensor, Any]:
    """Run a loss of one process on the last stage. stand_in: makes one of the model's inputs, and the output of the last piece

    raises: LossError unless it calls the model once, as the first stage was called
    """
    model = stand_in(microbatch[0], output)
    returned = loss(model, microbatch)
    if model.calls != 1:
        raise LossError(f"the loss called the model {model.calls} times, but a pipeline runs it once for each micro-batch")
    return returned


def expect_counted_on_one_rank(model: nn.Module, stages: Sequence[tuple[int, nn.Module]]) -> None:
    """Raise ConfigError for a module that counts what goes through it and is used by stages of several pipe ranks: each would have its own
    counts. A norm that the model holds in evaluation mode counts nothing. stages: and their ranks"""
    ranks: dict[int, set[int]] = {}
    for rank, stage in stages:
        for module in stage.modules():
            ranks.setdefault(id(module), set()).add(rank)
    experts = expert_layers(model)
    for name, module in model.named_modules():
        counts = name in experts or (isinstance(module, _NormBase) and module.track_running_stats
                                     and (module.training or not model.training))   # else the engine turns training mode on, everywhere
        if counts and len(ranks.get(id(module), ())) > 1:
            raise ConfigError(f"{name}, a {type(module).__name__}, is used on pipe ranks {sorted(ranks[id(module)])}, and each would "
                              "count, for its statistics, only what it sees itself: use it in one stage, or give each use its own")


def refuse_masks_in_several_stages(stages: Sequence[nn.Module]) -> None:
    """Let dropout that several stages use raise ConfigError when it draws: a mask is keyed by how often its module was called for the
    micro-batch, and no stage knows how often others called it."""
    uses = Counter(module for stage in stages for module in stage.modules() if isinstance(module, Keyed))
    for module, number in uses.items():
        if number > 1:   # a piece may have modules that it never calls
            module.register_forward_pre_hook(_expect_no_mask)


def _expect_no_mask(dropout: Keyed, _inputs: Any) -> None:
    if dropout.training and dropout.p > 0:
        raise ConfigError(f"dropout {dropout.name} is used in several stages of a pipeline, which would repeat its mask: use it in one "
                          "stage, or give each use its own")
