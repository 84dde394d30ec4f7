"""Mixture of experts: a router sends every token through a few of many MLPs. Plain torch, knows nothing of ranks.

    router     scores every expert for every token -> the k best, and their weights
    capacity   the most tokens of a row that an expert takes; without a capacity, and outside training, none is dropped
    experts    token vectors sorted by expert, each multiplied by its own expert's matrices

Capacity and balance loss are computed over a *row* (sequence), never over the batch. So losses, gradients and dropped tokens do
not depend on how rows are dealt to micro-batches and ranks. Where rows are cut over ranks, `SequencePart` collects the rest.

source: Shazeer et al. 2017; Fedus et al. 2021 (capacity, balance loss); Zoph et al. 2022 (z-loss);
        Wang et al. 2024 (bias in place of a loss); Dai et al. 2024 (shared experts; balance by row)
Shapes: B rows, T tokens, W width, E experts, k chosen per token, F inner width of an expert.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankloom.base.errors import ConfigError
from rankloom.base.hooks import copy_user_attributes
from rankloom.base.scoped import temporarily
from rankloom.base.tensors import at_least_fp32, keep_until_read
from rankloom.models.config import MoEConfig
from rankloom.models.mlp import MLP
from rankloom.models.sequence_part import WHOLE, SequencePart


class Experts(nn.Module):
    """The gated MLPs of all experts held here, stacked: each weight is [held, out, in].

    first: the number, in the whole layer, of the first expert held here
    """

    def __init__(self, config: MoEConfig, width: int):
        super().__init__()
        self.first = 0
        self.gate = nn.Parameter(torch.empty(config.experts, config.ffn, width))
        self.up = nn.Parameter(torch.empty(config.experts, config.ffn, width))
        self.down = nn.Parameter(torch.empty(config.experts, width, config.ffn))

    @property
    def held(self) -> int:
        """How many experts are held here."""
        return self.gate.shape[0]

    def keep(self, first: int, count: int) -> None:
        """Of the experts held, keep `count` from the `first` on; free the memory of the others."""
        for name, whole in list(self.named_parameters()):
            keep_until_read(whole)
            part = nn.Parameter(whole.detach()[first:first + count].clone(), requires_grad=whole.requires_grad)
            copy_user_attributes(part, whole)
            setattr(self, name, part)
        self.first += first

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [n, W] sorted by expert, counts [held] of rows for each expert, also 0 -> [n, W]."""
        inner = F.silu(grouped_product(rows, self.gate, counts)) * grouped_product(rows, self.up, counts)
        return grouped_product(inner, self.down, counts)


def grouped_product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Multiply each run of rows by the transpose of its matrix: rows [n, in], matrices [E, out, in], counts [E] -> [n, out]."""
    if _has_kernel(rows, matrices):
        return torch._grouped_mm(rows, matrices.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    runs = rows.split(counts.tolist())
    return torch.cat([run @ matrix.T for run, matrix in zip(runs, matrices.unbind(), strict=True)])


def _has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Whether torch has one kernel for all groups that we may use: bf16 on Hopper, rows of a multiple of 16 bytes.

    Not on later GPUs: there the gradient of an expert without rows is uninitialised memory (pytorch issue 172439).
    """
    return (rows.device.type == "cuda" and rows.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm")
            and matrices.shape[1] % 8 == 0 and matrices.shape[2] % 8 == 0 and torch.cuda.get_device_capability(rows.device)[0] == 9)


ROUNDING = 1e-12   # relative: as a float, a capacity of 1.1 is above 1.1, and 11.000000000000002 places would be 12
Dispatch = Callable[[nn.Module, Tensor, Tensor], Tensor]


def run_here(experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
    """The `dispatch` of a rank that holds all experts."""
    return experts(rows, counts)   # type: ignore[no-any-return]


class Choice(NamedTuple):
    """The router's result for tokens [B, T]."""

    experts: Tensor    # [B, T, k] the chosen experts
    weights: Tensor    # [B, T, k] their weights
    scores: Tensor     # [B, T, E] softmax of the logits over all experts
    logsumexp: Tensor  # [B, T] of the logits over all experts


class Router(nn.Module):
    """Chooses k experts for every token. It computes in fp32 or wider: a rounded score could choose another expert.

    bias: [E], added to scores for the choice only, not in the weights; `rebalance` changes it, gradients do not
    """

    def __init__(self, config: MoEConfig, width: int):
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.empty(config.experts, width))
        self.register_buffer("bias", torch.zeros(config.experts) if config.bias_rate else None)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)   # type: ignore[no-untyped-call]
        if self.bias is not None:     # 16 bits would round its small steps away
            self.bias = self.bias.to(at_least_fp32(self.bias.dtype))
        return self

    def forward(self, x: Tensor) -> Choice:
        """x: [B, T, W]. For k > 1 the weights add up to 1; for k = 1 the weight is the score, so that the router gets a gradient."""
        wide = at_least_fp32(x.dtype)
        with torch.autocast(x.device.type, enabled=False):   # autocast would round both again
            logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1)
        chosen = (scores if self.bias is None else scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
        # softmax over those chosen = scores over their sum; but a bias may choose experts whose scores are all 0, by underflow
        weights = logits.gather(-1, chosen).softmax(-1) if self.top_k > 1 else scores.gather(-1, chosen)
        return Choice(chosen, weights, scores, logits.logsumexp(-1))


class MoE(nn.Module):
    """A layer of experts in place of a block's MLP.

    dispatch:  runs the experts on their rows; replaced where experts are on other ranks
    auxiliary: the auxiliary losses of the last training forward, a sum over tokens; see `take_auxiliary`
    adds_up:   False: `auxiliary` is that of the last training forward. True, set by whoever takes it after every micro-batch: it adds up
               over training forwards with gradients
    reported_auxiliary: the sum of those taken since the last report, detached; see `take_reported_auxiliary_loss`
    routed:    [E] tokens sent to each expert in training since `rebalance`, dropped ones included
    dropped:   choices dropped because an expert was at capacity
    """

    def __init__(self, config: MoEConfig, width: int):
        super().__init__()
        self.config = config
        self.router = Router(config, width)
        self.experts = Experts(config, width)
        self.shared = MLP(width, config.shared * config.ffn) if config.shared else None
        self.dispatch: Dispatch = run_here
        self.auxiliary: Tensor | None = None
        self.adds_up = False
        self.reported_auxiliary: Tensor | None = None
        self.routed: Tensor | None = None
        self.dropped: Tensor | None = None

    def forward(self, x: Tensor, part: SequencePart = WHOLE) -> Tensor:
        """x: [B, T, W] -> [B, T, W]. A dropped choice adds nothing; the residual stream passes unchanged."""
        choice = self.router(x)
        chosen = part.gather(choice.experts)   # [B, all, k]: of whole rows
        kept = part.own(within_capacity(chosen, self.config)) if self.config.capacity and self.training else None
        if self.training:
            self._account(choice, chosen, kept)
        elif not self.adds_up:
            self.auxiliary = None   # an old loss that was never taken must not enter a later one
        mixed = self._through_experts(x, choice, kept)
        return mixed if self.shared is None else mixed + self.shared(x)

    def take_auxiliary(self) -> Tensor | None:
        """Return `auxiliary`, and clear it; see `take_auxiliary_loss` in base/loss.py."""
        extra, self.auxiliary = self.auxiliary, None
        if extra is not None:
            self.reported_auxiliary = extra.detach() if self.reported_auxiliary is None else self.reported_auxiliary + extra.detach()
        return extra

    @torch.no_grad()
    def rebalance(self, routed: Tensor) -> None:
        """After a step: raise the bias of experts with fewer tokens than the mean, lower the others'. routed: [E], over all ranks"""
        if self.router.bias is not None:
            routed = routed.to(self.router.bias)
            # Through `data`, which counts no new version: a new one would mark a running statistic, which ranks average after a step.
            self.router.bias.data += self.config.bias_rate * torch.sign(routed.mean() - routed)

    def _through_experts(self, x: Tensor, choice: Choice, kept: Tensor | None) -> Tensor:
        """x: [B, T, W] -> [B, T, W]: each token's weighted sum over its experts; those that are not in `kept` [B, T, k] add nothing."""
        k, experts = self.config.top_k, self.config.experts
        expert = choice.experts.flatten()   # [B*T*k]
        if kept is not None:
            expert = torch.where(kept.flatten(), expert, experts)   # sorts dropped choices last
        order = expert.argsort(stable=True)
        counts = how_often(expert, experts + 1)[:experts]
        if kept is not None:
            order = order[:int(counts.sum())]
        rows = self.dispatch(self.experts, x.flatten(0, 1)[order // k], counts)
        rows = rows * choice.weights.flatten()[order].unsqueeze(1).to(rows.dtype)
        # Every choice has its own place, so the order of the sum over k is fixed.
        places = rows.new_zeros(expert.numel(), x.shape[-1]).index_copy(0, order, rows)
        return places.view(*x.shape[:-1], k, x.shape[-1]).sum(-2)

    def _account(self, choice: Choice, chosen: Tensor, kept: Tensor | None) -> None:
        """Charge the auxiliary losses of a training forward, and count its tokens. chosen: of whole rows"""
        config = self.config
        extra = balance_loss(chosen, choice.scores) * config.balance_loss + choice.logsumexp.square().sum() * config.router_z_loss
        routed = how_often(choice.experts.flatten(), config.experts)
        self._remember(extra, routed, None if kept is None else (~kept).sum())

    @torch._disable_dynamo   # a compiled graph would keep the answer of its first run: "not in backward"
    def _remember(self, extra: Tensor, routed: Tensor, dropped: Tensor | None) -> None:
        if torch._C._current_graph_task_id() != -1:   # a recomputation in backward: already counted
            self._expect_trained(extra)
            return
        if not self.adds_up:
            self.auxiliary = extra
        elif torch.is_grad_enabled():   # a teacher's are no part of the loss
            self.auxiliary = extra if self.auxiliary is None else self.auxiliary + extra
        self.routed = routed if self.routed is None else self.routed + routed
        if dropped is not None:
            self.dropped = dropped if self.dropped is None else self.dropped + dropped

    def _expect_trained(self, extra: Tensor) -> None:
        """raises: ConfigError if a recomputation is the first forward with a graph, as that of a reentrant checkpoint is"""
        charged = self.config.balance_loss or self.config.router_z_loss
        if charged and extra.requires_grad and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            raise ConfigError("a layer of experts with auxiliary losses runs inside a reentrant checkpoint, whose forward has no graph: "
                              "they would not be trained. Give torch.utils.checkpoint use_reentrant=False, or use `recompute=`")

    def __getstate__(self) -> dict[str, Any]:
        """A copy owes no losses, has counted nothing, and belongs to nobody who takes its losses."""
        return self.__dict__ | dict.fromkeys(("auxiliary", "reported_auxiliary", "routed", "dropped")) | {"adds_up": False}


def how_often(numbers: Tensor, n: int) -> Tensor:
    """How often each of 0 .. n-1 occurs: [m] -> [n].

    Not `bincount`, which reads the maximum on the host: a device synchronisation.
    """
    return torch.zeros(n, dtype=torch.long, device=numbers.device).scatter_add_(0, numbers, torch.ones_like(numbers))


def within_capacity(chosen: Tensor, config: MoEConfig) -> Tensor:
    """Which choices, of whole rows, are within their expert's capacity: [B, T, k] -> bool [B, T, k].

    Each expert takes ceil(capacity * T * k / E) of a row, first choices before second ones, early tokens before late ones. So
    which tokens are dropped depends on their row alone, not on the rest of the batch or on the rank.
    """
    rows, length, k = chosen.shape
    room = ceil(min(config.capacity * length * k / config.experts, length * k) * (1 - ROUNDING))
    asked = chosen.transpose(1, 2).flatten(1)                      # [B, k*T]: all first choices, then all second ones
    order = asked.argsort(dim=1, stable=True)
    by_expert = asked.gather(1, order)
    counts = torch.zeros(rows, config.experts, dtype=torch.long, device=chosen.device).scatter_add_(1, asked, torch.ones_like(asked))
    begins = (counts.cumsum(1) - counts).gather(1, by_expert)      # where the run of its expert begins
    place = torch.arange(k * length, device=chosen.device) - begins
    kept = torch.empty_like(asked, dtype=torch.bool).scatter_(1, order, place < room)
    return kept.view(rows, k, length).transpose(1, 2)


def balance_loss(chosen: Tensor, scores: Tensor) -> Tensor:
    """How unevenly rows use the experts: a sum over tokens; 1 per token when all experts are used equally, more otherwise.

    chosen: [B, all, k], the experts chosen in whole rows
    scores: [B, T, E], of the tokens on this rank
    """
    experts = scores.shape[-1]
    asked = chosen.flatten(1)
    used = torch.zeros(chosen.shape[0], experts, dtype=scores.dtype, device=scores.device)
    used.scatter_add_(1, asked, torch.ones_like(asked, dtype=scores.dtype))
    return (used * (experts / max(1, asked.shape[1])) * scores.sum(1)).sum()


@contextmanager
def uncounted(module: nn.Module) -> Iterator[None]:
    """For a trial run: on exit, the expert layers inside `module` get back the counts and losses that they had on entry."""
    with ExitStack() as until_here:
        for layer in (each for each in module.modules() if isinstance(each, MoE)):
            until_here.enter_context(temporarily(layer, auxiliary=layer.auxiliary, routed=layer.routed, dropped=layer.dropped))
        yield


def take_reported_auxiliary_loss(layers: Iterable[nn.Module]) -> Tensor | None:
    """The auxiliary losses taken since the last call: the part of the loss sums that is not cross-entropy. fp64, or None."""
    taken = []
    for layer in layers:
        if isinstance(layer, MoE) and layer.reported_auxiliary is not None:
            taken.append(layer.reported_auxiliary.double())
            layer.reported_auxiliary = None
    return torch.stack(taken).sum() if taken else None
