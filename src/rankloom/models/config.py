"""The shape of a GPT, named presets, and the parameters and FLOPs of a shape. Pure arithmetic, without torch."""

from dataclasses import dataclass, fields, replace
from math import inf

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.base.expect import is_whole_number


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A mixture of experts in place of each block's MLP.

    >>> MoEConfig(experts=8, top_k=2, ffn=512).shared
    0
    """

    experts: int = 8
    top_k: int = 2                # routed experts for each token
    ffn: int = 512                # inner width of one expert
    shared: int = 0               # more experts, which every token goes through
    capacity: float = 0.0         # in training an expert takes at most capacity * T * top_k / experts tokens of a row of T; 0: no limit
    balance_loss: float = 0.01    # weight of the loss that evens the use of experts
    router_z_loss: float = 0.0    # weight of the loss that keeps the router's logits small
    bias_rate: float = 0.0        # how far a step moves the biases that even the use of experts without a loss; 0: no biases

    def __post_init__(self) -> None:
        for name, least in (("experts", 1), ("top_k", 1), ("ffn", 1), ("shared", 0)):
            value = getattr(self, name)
            if not is_whole_number(value, least):
                raise ConfigError(f"model.moe.{name} is {value!r}; it must be a whole number, {least} or more")
        if self.top_k > self.experts:
            raise ConfigError(f"model.moe.top_k = {self.top_k}, but there are {self.experts} experts")
        for name in ("capacity", "balance_loss", "router_z_loss", "bias_rate"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < inf:
                raise ConfigError(f"model.moe.{name} = {value!r}; it must be 0 or more, and finite")


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a Llama-style GPT: all numbers that define its parameters.

    >>> GPTConfig(width=512, heads=8).head_width
    64
    """

    vocab_size: int = 8192
    seq_len: int = 1024       # the longest sequence the model can read
    width: int = 512          # of the residual stream
    layers: int = 6
    heads: int = 8            # of the queries
    kv_heads: int = 8         # of keys and values; fewer than `heads` is grouped-query attention
    ffn: int = 1368           # inner width of the gated MLP
    tie: bool = False         # the output matrix is the embedding
    dropout: float = 0.0
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    moe: MoEConfig | None = None   # experts in place of the MLP

    def __post_init__(self) -> None:
        if isinstance(self.moe, dict):   # read back from JSON
            known = [field.name for field in fields(MoEConfig)]
            if unknown := self.moe.keys() - set(known):
                raise ConfigError(f"model.moe.{min(unknown)} is unknown. {did_you_mean(min(unknown), known)}")
            object.__setattr__(self, "moe", MoEConfig(**self.moe))
        if not isinstance(self.moe, MoEConfig | None):
            raise ConfigError(f"model.moe is {self.moe!r}; it must be a MoEConfig, or None for a dense model")
        for name in ("vocab_size", "seq_len", "width", "layers", "heads", "kv_heads", "ffn"):
            value = getattr(self, name)
            if not is_whole_number(value, 1):
                raise ConfigError(f"model.{name} is {value!r}; it must be a whole number, 1 or more")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(f"model.heads = {self.heads} must cut width = {self.width} in heads of an even width; "
                              f"{self.width} / {self.heads} = {self.width / self.heads:g}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model.kv_heads = {self.kv_heads} must divide heads = {self.heads}: "
                              "each key-value head serves the same number of query heads")
        if not isinstance(self.tie, bool):
            raise ConfigError(f"model.tie is {self.tie!r}; it must be True or False")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout = {self.dropout!r}; it must be a number in [0, 1)")
        if not all(_is_number(each) and 0 < each < inf for each in (self.rope_base, self.norm_eps)):
            raise ConfigError(f"model.rope_base = {self.rope_base!r} and norm_eps = {self.norm_eps!r} must be numbers above 0, and finite")

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Width of all keys (or all values) of one token."""
        return self.kv_heads * self.head_width


def _shape(width: int, layers: int, heads: int, ffn: int, **rest: object) -> GPTConfig:
    return GPTConfig(width=width, layers=layers, heads=heads, ffn=ffn, **{"kv_heads": heads, **rest})  # type: ignore[arg-type]


_LLAMA3 = dict(vocab_size=128256, kv_heads=8, seq_len=4096, rope_base=500000.0)

PRESETS: dict[str, GPTConfig] = {
    "1M": _shape(128, 4, 2, 320, vocab_size=2048, tie=True),
    "3M": _shape(192, 5, 3, 512, vocab_size=4096, tie=True),
    "11M": _shape(256, 8, 4, 768),
    "27M": _shape(512, 6, 8, 1368),
    "57M": _shape(768, 6, 12, 2176),
    "124M": _shape(768, 12, 12, 2048, vocab_size=50304, tie=True),          # the shape of GPT-2 small
    "350M": _shape(1024, 24, 16, 2752, vocab_size=50304, tie=True),         # GPT-2 medium
    "1.2B": _shape(2048, 16, 32, 8192, tie=True, **_LLAMA3),                # Llama 3.2 1B
    "3B": _shape(3072, 28, 24, 8192, tie=True, **_LLAMA3),                  # Llama 3.2 3B
    "8B": _shape(4096, 32, 32, 14336, **_LLAMA3),                           # Llama 3 8B
    "13B": _shape(5120, 40, 40, 13824, vocab_size=32000, seq_len=4096),     # Llama 2 13B
    "34B": _shape(8192, 48, 64, 22016, vocab_size=32000, kv_heads=8, seq_len=4096),   # Code Llama 34B
    "70B": _shape(8192, 80, 64, 28672, **_LLAMA3),                          # Llama 3 70B
}


def preset(name: str, **overrides: object) -> GPTConfig:
    """A named shape, with some fields replaced. Names are parameter counts, at the preset's own vocabulary.

    raises: ConfigError for an unknown name or field; it suggests the nearest one
    """
    if name not in PRESETS:
        raise ConfigError(f"no model preset {name!r}. {did_you_mean(name, PRESETS)} `rankloom presets` tells of all")
    known = [field.name for field in fields(GPTConfig)]
    for key in overrides:
        if key not in known:
            raise ConfigError(f"no model setting {key!r}. {did_you_mean(key, known)}")
    return replace(PRESETS[name], **overrides)  # type: ignore[arg-type]


def parameter_count(config: GPTConfig) -> int:
    """Parameters of `GPT(config)`. A tied matrix counts once."""
    return _parameters_with_experts(config, 0 if config.moe is None else config.moe.experts)


def _parameters_with_experts(config: GPTConfig, experts: int) -> int:
    """The same, with so many routed experts counted in each block."""
    attention = 2 * config.width * (config.width + config.kv_width)     # query, output; key, value
    moe = config.moe
    inner = config.ffn if moe is None else (experts + moe.shared) * moe.ffn
    router = 0 if moe is None else moe.experts * config.width
    block = attention + 3 * config.width * inner + router + 2 * config.width
    tables = config.vocab_size * config.width * (1 if config.tie else 2)
    return tables + config.layers * block + config.width


def model_flops_per_token(config: GPTConfig, seq_len: int | None = None) -> int:
    """Floating-point operations of forward and backward per token: 6 x parameters + causal attention.

    The 6: each weight is used in one multiply-add forward, and two backward. Attention adds, per layer, scores and weighted
    values over on average seq_len / 2 earlier tokens: 2 x 2 x width x seq_len / 2 forward, three times that with backward.
    By convention an untied embedding counts as if it were multiplied. Of the routed experts, `top_k` per token count.
    Recomputed activations do not count: these are model FLOPs, not hardware FLOPs.
    """
    seq_len = config.seq_len if seq_len is None else seq_len
    used = _parameters_with_experts(config, 0 if config.moe is None else config.moe.top_k)
    return 6 * used + 6 * config.layers * config.width * seq_len
