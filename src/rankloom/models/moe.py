"""Mixture of experts: every token goes through a few of many MLPs, chosen by a router. Plain torch, knows nothing of ranks.

    router     scores of every expert for every token -> the chosen ones, and their weights
    capacity   an expert takes so many tokens of a row, and no more; without one, and outside training, nothing is dropped
    experts    rows sorted by expert, each run through the matrices of its own

Everything that looks at more than one token looks at its *row* (sequence), never at the batch: the balance that the auxiliary
loss asks for, and the capacity. So losses, gradients and dropped tokens are the same however rows are dealt to micro-batches
and ranks. Where rows themselves are cut, the `SequencePart` knows the rest of them.

source: Shazeer et al. 2017; Fedus et al. 2021 (capacity, balance loss); Zoph et al. 2022 (z-loss);
        Wang et al. 2024 (bias in place of a loss); Dai et al. 2024 (shared experts; balance by row)
Shapes: B rows, T tokens, W width, E experts, k chosen per token, F inner width of an expert.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankloom.base.hooks import copy_user_attributes
from rankloom.base.scoped import temporarily
from rankloom.models.config import MoEConfig
from rankloom.models.mlp import MLP
from rankloom.models.sequence_part import WHOLE, SequencePart


class Experts(nn.Module):
    """Gated MLPs side by side: one matrix [held, out, in] holds a layer of all of them.

    first: which expert of the whole layer is the first one held here
    """

    def __init__(self, config: MoEConfig, width: int):
        super().__init__()
        self.first = 0
        self.gate = nn.Parameter(torch.empty(config.experts, config.ffn, width))
        self.up = nn.Parameter(torch.empty(config.experts, config.ffn, width))
        self.down = nn.Parameter(torch.empty(config.experts, width, config.ffn))

    @property
    def held(self) -> int:
        """How many experts are here."""
        return self.gate.shape[0]

    def keep(self, first: int, count: int) -> None:
        """Forget all experts but `count` from number `first` of those held; the others' memory is freed."""
        for name, whole in list(self.named_parameters()):
            part = nn.Parameter(whole.detach()[first:first + count].clone(), requires_grad=whole.requires_grad)
            copy_user_attributes(part, whole)
            setattr(self, name, part)
        self.first += first

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [n, W] sorted by expert, counts [held] of each -> [n, W]; an expert may have none."""
        inner = F.silu(grouped_product(rows, self.gate, counts)) * grouped_product(rows, self.up, counts)
        return grouped_product(inner, self.down, counts)


def grouped_product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Each run of rows times the transpose of its own matrix: rows [n, in], matrices [E, out, in], counts [E] -> [n, out]."""
    if _has_kernel(rows, matrices):
        return torch._grouped_mm(rows, matrices.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    runs = rows.split(counts.tolist())
    return torch.cat([run @ matrix.T for run, matrix in zip(runs, matrices.unbind(), strict=True)])


def _has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Whether torch multiplies groups in one kernel: bf16 on Hopper, rows of whole 16 bytes.

    Not on what came after Hopper: there the gradient of an expert without rows is what lay in memory (pytorch issue 172439).
    """
    return (rows.device.type == "cuda" and rows.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm")
            and matrices.shape[1] % 8 == 0 and matrices.shape[2] % 8 == 0 and torch.cuda.get_device_capability(rows.device)[0] == 9)


Dispatch = Callable[[nn.Module, Tensor, Tensor], Tensor]


def run_here(experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
    """How rows get to their experts, when all experts are here."""
    return experts(rows, counts)   # type: ignore[no-any-return]


class Choice(NamedTuple):
    """What the router says of tokens [B, T]."""

    experts: Tensor    # [B, T, k] whom each token goes to
    weights: Tensor    # [B, T, k] how much each counts
    scores: Tensor     # [B, T, E] softmax over all experts
    spread: Tensor     # [B, T] log-sum-exp of what the softmax is of


class Router(nn.Module):
    """Chooses k experts for every token. It computes in fp32 at least: a rounded score sends a token elsewhere.

    bias: [E], added for the choice only, not to the weights; moved by `rebalance`, never by gradients
    """

    def __init__(self, config: MoEConfig, width: int):
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.empty(config.experts, width))
        self.register_buffer("bias", torch.zeros(config.experts) if config.bias_rate else None)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)   # type: ignore[no-untyped-call]
        if self.bias is not None:     # in 16 bits its small moves would be rounded away
            self.bias = self.bias.to(torch.promote_types(self.bias.dtype, torch.float32))
        return self

    def forward(self, x: Tensor) -> Choice:
        """x: [B, T, W]. Weights of several experts add up to 1; that of an only one is its score, or the router could not learn."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):   # it would round them again
            logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1)
        chosen = (scores if self.bias is None else scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return Choice(chosen, weights, scores, logits.logsumexp(-1))


class MoE(nn.Module):
    """A layer of experts in place of a block's MLP.

    dispatch: how rows get to their experts; replaced where experts are on other ranks
    auxiliary: the auxiliary losses of the last training forward, a sum over tokens; see `take_auxiliary`
    reported_auxiliary: those that were taken, added up, without gradients; see `take_reported_auxiliary_loss`
    routed:   tokens sent to each expert [E] in training, since `rebalance`; dropped ones included
    dropped:  choices that exceeded a capacity
    """

    def __init__(self, config: MoEConfig, width: int):
        super().__init__()
        self.config = config
        self.router = Router(config, width)
        self.experts = Experts(config, width)
        self.shared = MLP(width, config.shared * config.ffn) if config.shared else None
        self.dispatch: Dispatch = run_here
        self.auxiliary: Tensor | None = None
        self.reported_auxiliary: Tensor | None = None
        self.routed: Tensor | None = None
        self.dropped: Tensor | None = None

    def forward(self, x: Tensor, part: SequencePart = WHOLE) -> Tensor:
        """x: [B, T, W] -> [B, T, W]; what was dropped adds nothing, so the token keeps its residual stream."""
        choice = self.router(x)
        row = part.gather(choice.experts)
        kept = part.own(within_capacity(row, self.config)) if self.config.capacity and self.training else None
        if self.training:
            self._account(choice, row, kept)
        else:
            self.auxiliary = None   # what nobody took belongs to no later loss
        mixed = self._through_experts(x, choice, kept)
        return mixed if self.shared is None else mixed + self.shared(x)

    def take_auxiliary(self) -> Tensor | None:
        """The auxiliary losses of the last training forward, once; see `take_auxiliary_loss` in base/loss.py."""
        extra, self.auxiliary = self.auxiliary, None
        if extra is not None:
            self.reported_auxiliary = extra.detach() if self.reported_auxiliary is None else self.reported_auxiliary + extra.detach()
        return extra

    @torch.no_grad()
    def rebalance(self, routed: Tensor) -> None:
        """After a step: move the router's bias towards experts that had fewer tokens than the mean. routed: [E], of all ranks."""
        if self.router.bias is not None:
            routed = routed.to(self.router.bias)
            # Through `data`: every rank moves it alike, so it is none of the running statistics that ranks average after a step.
            self.router.bias.data += self.config.bias_rate * torch.sign(routed.mean() - routed)

    def _through_experts(self, x: Tensor, choice: Choice, kept: Tensor | None) -> Tensor:
        expert, k, n = choice.experts.flatten(), self.config.top_k, self.config.experts
        if kept is not None:
            expert = torch.where(kept.flatten(), expert, n)   # the dropped, after all others
        order = expert.argsort(stable=True)
        counts = how_often(expert, n + 1)[:n]
        if kept is not None:
            order = order[:int(counts.sum())]
        rows = self.dispatch(self.experts, x.flatten(0, 1)[order // k], counts)
        rows = rows * choice.weights.flatten()[order].unsqueeze(1).to(rows.dtype)
        # Every choice has a place of its own: no two are added up in an order of chance.
        places = rows.new_zeros(expert.numel(), x.shape[-1]).index_copy(0, order, rows)
        return places.view(*x.shape[:-1], k, x.shape[-1]).sum(-2)

    def _account(self, choice: Choice, row: Tensor, kept: Tensor | None) -> None:
        config = self.config
        extra = balance_loss(row, choice.scores) * config.balance_loss + choice.spread.square().sum() * config.router_z_loss
        routed = how_often(choice.experts.flatten(), config.experts)
        self._remember(extra, routed, None if kept is None else (~kept).sum())

    @torch._disable_dynamo   # a graph would hold for ever that this is not a backward
    def _remember(self, extra: Tensor, routed: Tensor, dropped: Tensor | None) -> None:
        if torch._C._current_graph_task_id() != -1:   # recomputed in backward: it was counted before
            return
        self.auxiliary = extra
        self.routed = routed if self.routed is None else self.routed + routed
        if dropped is not None:
            self.dropped = dropped if self.dropped is None else self.dropped + dropped


def how_often(numbers: Tensor, n: int) -> Tensor:
    """How often each number below n is among these: [m] -> [n].

    `bincount` reads the maximum on the host: a device synchronisation.
    """
    return torch.zeros(n, dtype=torch.long, device=numbers.device).scatter_add_(0, numbers, torch.ones_like(numbers))


def within_capacity(chosen: Tensor, config: MoEConfig) -> Tensor:
    """Which choices of whole rows an expert has room for: [B, T, k] -> bool [B, T, k].

    Each expert takes ceil(capacity * T * k / E) of a row, first choices before second ones, early tokens before late ones. So
    who is dropped depends on the row alone, not on who else is in the batch or on which rank.
    """
    rows, length, k = chosen.shape
    room = ceil(config.capacity * length * k / config.experts)
    asked = chosen.transpose(1, 2).flatten(1)                      # [B, k*T]: all first choices, then all second ones
    order = asked.argsort(dim=1, stable=True)
    by_expert = asked.gather(1, order)
    counts = torch.zeros(rows, config.experts, dtype=torch.long, device=chosen.device).scatter_add_(1, asked, torch.ones_like(asked))
    begins = (counts.cumsum(1) - counts).gather(1, by_expert)      # where each one's expert begins
    place = torch.arange(k * length, device=chosen.device) - begins
    kept = torch.empty_like(asked, dtype=torch.bool).scatter_(1, order, place < room)
    return kept.view(rows, k, length).transpose(1, 2)


def balance_loss(row: Tensor, scores: Tensor) -> Tensor:
    """How unevenly rows use the experts: a sum over tokens, 1 for each when all experts are used alike, more when not.

    row:    [B, T', k], the choices of whole rows
    scores: [B, T, E], of the tokens that are here
    """
    experts = scores.shape[-1]
    asked = row.flatten(1)
    used = torch.zeros(row.shape[0], experts, dtype=scores.dtype, device=scores.device)
    used.scatter_add_(1, asked, torch.ones_like(asked, dtype=scores.dtype))
    return (used * (experts / max(1, asked.shape[1])) * scores.sum(1)).sum()


@contextmanager
def uncounted(module: nn.Module) -> Iterator[None]:
    """Whatever runs in here is a trial: layers of experts inside `module` have then counted what they had before, and have their losses."""
    with ExitStack() as until_here:
        for layer in (each for each in module.modules() if isinstance(each, MoE)):
            until_here.enter_context(temporarily(layer, auxiliary=layer.auxiliary, routed=layer.routed, dropped=layer.dropped))
        yield


def take_reported_auxiliary_loss(layers: Iterable[nn.Module]) -> Tensor | None:
    """What was taken since this was last asked: which part of the loss sums is no cross-entropy. fp64; None: nothing."""
    taken = []
    for layer in layers:
        if isinstance(layer, MoE) and layer.reported_auxiliary is not None:
            taken.append(layer.reported_auxiliary.double())
            layer.reported_auxiliary = None
    return torch.stack(taken).sum() if taken else None
