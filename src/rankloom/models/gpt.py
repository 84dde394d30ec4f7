"""A Llama-style GPT in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU, optional tying.

It knows nothing of ranks. Each parameter draws its initial values from a random stream keyed by its name. So they do not depend
on which rank builds which part, nor on order or device. Read config.py before this file; loss.py has the output matrix and the loss.

Shapes: B rows, T tokens, W width, H query heads, K key-value heads, D = W / H.
"""

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError, DataError
from rankloom.base.expect import expect_type
from rankloom.base.loss import take_auxiliary_loss
from rankloom.base.rng import stream
from rankloom.models.config import GPTConfig
from rankloom.models.loss import Kernel, Output
from rankloom.models.mlp import MLP
from rankloom.models.moe import Experts, MoE
from rankloom.models.sequence_part import WHOLE, Packed, SequencePart

INIT_STD = 0.02     # GPT-2's; outputs into the residual stream are divided by sqrt(2 x layers)


class Rotary(nn.Module):
    """Tables of cosines and sines [T, D/2], made in fp64, kept in fp32, or in fp64 for an fp64 model.

    They are attributes, not buffers, so they are not saved, broadcast or cut over ranks. They are rebuilt, not cast, when the
    model moves or changes dtype: bf16 tables would rotate token 300 like token 301.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.seq_len, self.width, self.base = config.seq_len, config.head_width, config.rope_base
        self.build(torch.device("cpu"), torch.float32)

    def build(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compute the tables for a device and a dtype."""
        steps = torch.arange(0, self.width, 2, dtype=torch.float64, device="cpu")
        angles = torch.outer(torch.arange(self.seq_len, dtype=torch.float64, device="cpu"), self.base ** (-steps / self.width))
        self.cos, self.sin = (t.to(device=device, dtype=dtype) for t in (angles.cos(), angles.sin()))

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        probe = fn(torch.empty(0, dtype=self.cos.dtype, device=self.cos.device))
        self.build(probe.device, torch.float64 if probe.dtype == torch.float64 else torch.float32)
        return super()._apply(fn, recurse)   # type: ignore[no-untyped-call]

    def expect_room(self, length: int) -> None:
        """Raise DataError for a sequence of more tokens than there are positions."""
        if length > self.seq_len:
            raise DataError(f"a sequence of {length} tokens, but the model reads at most {self.seq_len}; raise seq_len or cut the sequence")

    def forward(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [stop - start, 1, D/2] of positions start .. stop - 1."""
        return self.cos[start:stop, None], self.sin[start:stop, None]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, 1, D/2] of n positions in any order."""
        return self.cos[positions, None], self.sin[positions, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its position's angle. x: [B, T, heads, D]; source: Su et al. 2021."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class KVCache:
    """Keys and values of the tokens read so far, for one block: [B, capacity, K, D] each, K counting the heads on this rank."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values [B, T, K, D] of new tokens; returns those of all tokens."""
        if not self.length:
            self.keys, self.values = (x.new_empty(len(x), self.capacity, *x.shape[2:]) for x in (keys, values))
        start = self.length
        self.length += keys.shape[1]
        self.keys[:, start:self.length], self.values[:, start:self.length] = keys, values
        return self.keys[:, :self.length], self.values[:, :self.length]


class Attention(nn.Module):
    """Causal attention in which `heads / kv_heads` query heads share one key-value head."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_width = config.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.kv_width, bias=False)
        self.value = nn.Linear(config.width, config.kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None, part: SequencePart = WHOLE) -> Tensor:
        """x: [B, T, W] -> [B, T, W]. The number of heads follows from the weights, which may be cut over ranks."""
        query, key, value = (f(x).unflatten(-1, (-1, self.head_width)) for f in (self.query, self.key, self.value))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if cache is not None:
            key, value = cache.extend(key, value)
        return self.output(part.attend(query, key, value).flatten(2))   # type: ignore[no-any-return]


def _dropout(config: GPTConfig) -> nn.Module:
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


class Block(nn.Module):
    """Attention and MLP, each with a norm before it, each added to the residual stream."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.attention_dropout = _dropout(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config.width, config.ffn) if config.moe is None else MoE(config.moe, config.width)
        self.mlp_dropout = _dropout(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None, part: SequencePart = WHOLE) -> Tensor:
        """x: [B, T, W] -> [B, T, W]; cos and sin are those of the T positions."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), cos, sin, cache, part))
        inner = self.mlp_norm(x)
        # a router needs whole rows; a plain MLP, which the user may replace, takes only its input
        return x + self.mlp_dropout(self.mlp(inner, part) if isinstance(self.mlp, MoE) else self.mlp(inner))   # type: ignore[no-any-return]


class GPT(nn.Module):
    """The model. `model(tokens)` gives logits; `model(tokens, targets=targets)` gives (loss sum, count).

    A model with a tied output has no head: the shared matrix is one parameter with one name.
    loss_kernel: may be set to a compiled `loss_and_gradient`
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0, device: torch.device | str = "cpu",
                 dtype: torch.dtype = torch.float32):
        expect_type("config", config, GPTConfig, "a GPTConfig")
        super().__init__()
        self.config = config
        self.loss_kernel: Kernel | None = None
        with torch.device("meta"):     # `initialize` allocates and draws each parameter once
            # nn.Embedding(...) draws values, on the meta device too, and that makes torch import its compiler.
            self.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.width), freeze=False)
            self.embedding_dropout = _dropout(config)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
            self.head = None if config.tie else nn.Linear(config.width, config.vocab_size, bias=False)
        self.output = Output(config.vocab_size)
        self.rotary = Rotary(config)
        self.to(dtype)     # nothing is allocated yet
        if torch.device(device).type != "meta":
            initialize(self, seed=seed, device=device)

    @property
    def output_weight(self) -> nn.Parameter:
        """The matrix [V, W] that turns hidden states into logits."""
        return self.embedding.weight if self.head is None else self.head.weight   # type: ignore[return-value]

    def parameters_read_by_forward(self) -> list[nn.Parameter]:
        """The output matrix, of a module that does not run itself: it is gathered with the root (parallel/sections/wrapping.py)."""
        return [self.output_weight]

    @property
    def tp_plan(self) -> dict[str, str]:
        """How `rankloom.tensor_parallel` cuts this model: module names -> styles of Hugging Face's plans, and a few of our own."""
        plan = {"embedding": "embedding_rowwise", "output": "vocabulary_output", "blocks.*.attention.output": "rowwise"}
        plan |= {f"blocks.*.attention.{name}": "colwise" for name in ("query", "key", "value")}
        if self.config.moe is None:
            plan |= {"blocks.*.mlp.gate": "colwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}
        return plan if self.head is None else plan | {"head": "colwise_rep"}

    @property
    def tp_sequence_plan(self) -> dict[str, str]:
        """The same, with the residual stream cut by tokens (sequence parallel).

        raises: ConfigError for a mixture of experts
        """
        if self.config.moe is not None:
            raise ConfigError("tp_sequence_plan cuts the stream by tokens, but the routers of a mixture of experts look at whole rows; "
                              "use tp_plan, or leave the plan out")
        dropouts = ("embedding_dropout", "blocks.*.attention_dropout", "blocks.*.mlp_dropout") if self.config.dropout else ()
        return (self.tp_plan | dict.fromkeys(("blocks.*.attention_norm", "blocks.*.mlp_norm", "norm"), "sequence_parallel")
                | dict.fromkeys(dropouts, "sequence_dropout"))

    def hidden(self, tokens: Tensor, caches: list[KVCache] | None = None, part: SequencePart = WHOLE) -> Tensor:
        """tokens [B, T] -> hidden states [B, T, W], the input of the output matrix.

        part:   says which part of whole sequences the tokens are
        raises: DataError when the cached and the new tokens together exceed `seq_len`
        """
        start = caches[0].length if caches else 0
        stop = start + tokens.shape[1]
        self.rotary.expect_room(stop)
        cos, sin = self.rotary(start, stop) if part.positions is None else self.rotary.at(part.positions)
        x = self.embedding_dropout(self.embedding(tokens))
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, caches[i] if caches else None, part)
        return self.norm(x)   # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, targets: Tensor | None = None, *, documents: Tensor | None = None, part: SequencePart = WHOLE,
                caches: list[KVCache] | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """tokens [B, T] -> logits [B, T, V]; with targets [B, T] -> (sum of the loss, number of targets counted).

        documents: [B, T], the number of each token's document, for packed rows; a token attends only to its own document
                   (see `document_cuts`)
        caches:    keys and values of earlier tokens; the logits are then [B, 1, V], of the last token only
        In training the sum includes the auxiliary losses of routers, which are sums over tokens too.
        """
        hidden = self.hidden(tokens, caches, part if documents is None else Packed(documents, tokens))
        if targets is None:
            return self.output(hidden if caches is None else hidden[:, -1:], self.output_weight)   # type: ignore[no-any-return]
        total, count = self.output(hidden, self.output_weight, targets, self.loss_kernel)
        extra = take_auxiliary_loss(self) if self.training else None
        return total if extra is None else total + extra, count


def initialize(model: GPT, *, seed: int, device: torch.device | str) -> None:
    """Allocate a model that is on the meta device, and give every parameter and buffer its values."""
    model.to_empty(device=device)
    fill = initial_values(model, seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        fill(name, tensor.detach())


def initial_values(model: GPT, seed: int) -> Callable[[str, Tensor], None]:
    """fill(name, tensor): gives a tensor of this model its initial values, in place.

    They are drawn on the CPU in fp32, from a stream keyed by the name. So they are the same on any device, in any dtype and on any rank.
    """
    buffers = {name for name, _ in model.named_buffers()}
    # Read now: the model may be split before `fill` runs.
    first = {name: module.first for name, module in model.named_modules() if isinstance(module, Experts)}

    def fill(name: str, tensor: Tensor) -> None:
        if name in buffers:                           # biases of routers
            tensor.zero_()
        elif tensor.dim() == 1:                       # norms
            tensor.fill_(1.0)
        elif tensor.dim() == 3:                       # experts: one stream each, on any rank
            for number, matrix in enumerate(tensor, start=first[name.rpartition(".")[0]]):
                _draw(matrix, model.config, seed, name, number)
        else:
            _draw(tensor, model.config, seed, name)

    return fill


INTO_RESIDUAL = ("attention.output.weight", "mlp.down.weight", "mlp.shared.down.weight", "mlp.experts.down")


def _draw(into: Tensor, config: GPTConfig, seed: int, name: str, *number: int) -> None:
    std = INIT_STD / sqrt(2 * config.layers) if name.endswith(INTO_RESIDUAL) else INIT_STD
    drawn = torch.empty(into.shape, dtype=torch.float32, device="cpu")   # where its generator is
    into.copy_(drawn.normal_(0.0, std, generator=stream(seed, "init", name, *number)))


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise DataError when a token is not in the vocabulary. It waits for the device, so do not call it in every step."""
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise DataError(f"tokens from {int(tokens.min())} to {int(tokens.max())}, but the model's vocabulary is "
                        f"0 to {vocab_size - 1}; the data was made with another tokenizer, or the model is too small")
