"""What a config file may say: a frozen, strict model for each section, and the rules between sections.

Nothing is accepted and then ignored. An option that has no effect, or excludes another one, is refused here, before any rank starts. No
torch in this file: a mistake is reported in milliseconds. `config.py` turns a file and command-line overrides into a `Config`.
"""

import json
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rankloom.base.compression import EXACT, expect_compression, expect_exact_steps, split_compression
from rankloom.base.errors import ConfigError, MeshError, did_you_mean
from rankloom.base.mesh import Mesh
from rankloom.base.quantities import LONGEST_TIMEOUT, parse_size
from rankloom.models.config import GPTConfig, MoEConfig, preset
from rankloom.parallel.pipeline.schedules import SCHEDULES
from rankloom.parallel.pipeline.search import SEARCHED, stages_a_rank
from rankloom.train.batch_size import LOGICAL_SHARDS, Batch, solve_batch
from rankloom.train.blocks.budget import CHOICES, NONE
from rankloom.train.rules import conflicts, float8_misfit

LARGEST = (1 << 63) - 1   # the largest int64
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Stage = Annotated[int, Field(ge=0, le=3)]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
PRINTABLE = r"^[^\x00-\x1f\x7f]+$"
BYTES_VOCAB = 257   # 256 bytes and the end of a text
MOE = MoEConfig()


class ConfigSection(BaseModel):
    """Frozen; unknown keys, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Run(ConfigSection):
    """Where the results go, and the seed that every random stream starts from."""

    name: str | None = Field(default=None, pattern=NAME)   # left out: time stamp and preset
    folder: str = Field(default="runs", pattern=PRINTABLE)   # where run folders are made
    seed: Whole = 0   # of weights, dropout and the order of data

    @model_validator(mode="after")
    def _not_the_word_that_removes(self) -> Self:
        if self.name == "none":   # a launcher gives it to its ranks as a flag
            raise ValueError('name cannot be "none", the word that removes a key on the command line')
        return self


class MeshSection(ConfigSection):
    """The grid of ranks. `replicate` may be left out: it gets the ranks that the other axes leave.

    If `shard` is left out too, these ranks go along `replicate` at stage 0, and along `shard` at stages 1 to 3.
    """

    pipe: Count = 1   # stages of layers
    replicate: Count | None = None   # copies of the model, each with rows of its own
    shard: Count | None = None   # ranks that share parameters, gradients and optimizer state ([train] stage); each has its own rows
    context: Count = 1   # parts of each sequence
    tensor: Count = 1   # parts of each matrix
    expert: Count = 1   # ranks over which experts are distributed

    def as_mesh(self) -> Mesh:
        """This section as a `Mesh`; axes that are left out are 1."""
        return Mesh(**{axis: ranks or 1 for axis, ranks in self})

    def row_ranks(self) -> int:
        """The number of ranks over which rows of a batch are distributed. Along the other axes, ranks have the same rows."""
        return (self.replicate or 1) * (self.shard or 1) * self.expert

    def is_known(self) -> bool:
        """Whether the number of ranks is known."""
        return self.replicate is not None

    def filled(self, ranks: int, stage: int) -> dict[str, int]:
        """The axes replicate and shard of a run on `ranks` ranks, if `replicate` is left out.

        raises: MeshError when the axes that are given do not divide the ranks
        """
        others = self.pipe * self.context * self.tensor * self.expert
        shard = self.shard or (max(1, ranks // others) if stage else 1)
        if ranks % (shard * others):
            mesh = replace(self.as_mesh(), replicate=1, shard=shard)
            raise MeshError(f"[mesh] {mesh.product()} does not divide the {ranks} ranks")
        return {"replicate": ranks // (shard * others), "shard": shard}


class MoESection(ConfigSection):
    """A mixture of experts in place of each block's MLP. MoEConfig in models/config.py explains each number."""

    experts: Count = MOE.experts   # in each block
    top_k: Count = MOE.top_k   # experts that a token goes to
    ffn: Count = MOE.ffn   # inner width of an expert
    shared: Whole = MOE.shared   # experts that every token goes to
    capacity: float = Field(default=MOE.capacity, ge=0)   # most tokens per expert, as a multiple of its fair share; 0: no limit
    balance_loss: float = Field(default=MOE.balance_loss, ge=0)   # weight of the auxiliary loss
    router_z_loss: float = Field(default=MOE.router_z_loss, ge=0)   # weight of the router z-loss
    bias_rate: float = Field(default=MOE.bias_rate, ge=0)   # step of the biases that balance without an auxiliary loss


class Model(ConfigSection):
    """A preset by name, and what to change in it. The sequence length is that of [train]."""

    preset: str = "3M"   # `rankloom presets` lists them
    vocab_size: Count | None = None   # left out: the tokenizer's
    width: Count | None = None   # of the residual stream
    layers: Count | None = None   # blocks
    heads: Count | None = None   # of queries
    kv_heads: Count | None = None   # of keys and values
    ffn: Count | None = None   # inner width of the MLP
    tie: bool | None = None   # one matrix for embedding and head
    dropout: Fraction | None = None
    rope_base: Positive | None = None   # of the rotary embedding
    norm_eps: Positive | None = None
    moe: MoESection | None = None        # left out: dense

    def overrides(self) -> dict[str, Any]:
        """The keys that change the preset, without `vocab_size`."""
        return self.model_dump(exclude={"preset", "vocab_size"}, exclude_none=True)

    @model_validator(mode="after")
    def _one_kind_of_mlp(self) -> Self:
        if self.moe is not None and self.ffn is not None:
            raise ValueError(f"ffn = {self.ffn} has no meaning with [model.moe], whose experts stand in place of the MLP: give moe.ffn")
        return self


class Data(ConfigSection):
    """The text, its tokenizer, and the part that is kept for validation."""

    source: str = Field(default="stdlib", pattern=PRINTABLE)               # stdlib, shakespeare, or a path
    tokenizer: str | None = Field(default=None, pattern=PRINTABLE)         # bytes (when left out), bpe, or a tokenizer.json
    vocab_size: Count | None = None   # tokens that bpe learns, or that an array of tokens has
    validation: float = Field(default=0.05, gt=0, lt=1)   # the fraction of the text that is not trained on
    cache: str | None = Field(default=None, pattern=PRINTABLE)   # folder of tokenised texts; left out: ~/.cache/rankloom
    baseline: bool = True                                          # compute a trigram model's loss to compare with

    @model_validator(mode="after")
    def _vocab_size_has_a_meaning(self) -> Self:
        if self.is_array():
            if self.vocab_size is None or self.tokenizer in ("bytes", "bpe"):
                raise ValueError("an array of tokens needs vocab_size, and tokenizer = none or the tokenizer.json that made it")
        elif self.tokenizer == "bpe":
            if self.vocab_size is None:
                raise ValueError('tokenizer = "bpe" needs vocab_size, the number of tokens to learn, such as 4096')
        elif self.vocab_size is not None:
            raise ValueError('vocab_size has no meaning here: only tokenizer = "bpe" and arrays of tokens take one')
        return self

    @field_validator("tokenizer")
    @classmethod
    def _known_tokenizer(cls, tokenizer: str | None) -> str | None:
        if tokenizer in (None, "bytes", "bpe") or tokenizer.endswith(".json"):
            return tokenizer
        raise ValueError("must be 'bytes', 'bpe' or the path of a tokenizer.json")

    def is_array(self) -> bool:
        """Whether the source is an array of tokens."""
        return self.source.endswith((".npy", ".bin"))


class Train(ConfigSection):
    """How many steps, how much per step, and how it is computed.

    Give `local_batch_size` or `global_batch_size`; the other, and `accumulate`, are computed.
    """

    steps: Count = 1000
    seq_len: Count = 256   # tokens per row
    local_batch_size: Count | None = None   # rows of a micro-batch of one rank
    global_batch_size: Count | None = None   # rows of a step, over all ranks
    accumulate: Count | None = None   # micro-batches of a step; left out: 1, or with [mesh] pipe as many as keep the stages busy
    precision: Literal["fp32", "fp64", "bf16", "fp16", "fp8"] = "fp32"   # of forward and backward; master weights are fp32, or fp64
    deterministic: bool | Count = False   # same bits on any number of ranks; true: 8 logical shards; a number: that many
    threads: Count | None = None            # CPU threads per rank; left out: as set by the launcher or torch
    stage: Stage = 0   # sharded over [mesh] shard: 1 optimizer state, 2 gradients too, 3 parameters too; left out: 3 if shard > 1
    recompute: str = NONE               # none, selective, full, or the bytes that activations may take: 24 GiB
    offload: bool = False              # stages 1 to 3: slices, gradients and optimizer state in host memory; the optimizer on the CPU
    offload_activations: bool = False   # what blocks keep for backward is moved to host memory until then
    compile: bool = False              # compile each block with torch.compile
    pipe: str | None = None            # [mesh] pipe: the schedule of a step's micro-batches; left out: 1f1b (rankloom schedule list)
    reshard_after_forward: bool | Count = True   # stage 3; false: parameters stay until backward; n: sharded over n neighbours
    tensor_overlap: Count = 1   # [mesh] tensor: pieces of a row-cut product, each sent while the next is multiplied
    evaluate: bool = True   # measure the validation loss
    eval_every: Whole = 0   # 0: only after the last step
    samples: Whole = 3   # texts that the model writes at the end
    sample_tokens: Count = 128   # tokens of each text

    @field_validator("recompute")
    @classmethod
    def _known_recompute(cls, policy: str) -> str:
        if policy[:1].isdigit():
            parse_size(policy)
        elif policy not in CHOICES:
            raise ValueError("must be 'none', 'selective', 'full', or the bytes that activations may take, such as '24 GiB'")
        return policy

    @field_validator("pipe")
    @classmethod
    def _known_schedule(cls, name: str | None) -> str | None:
        if name not in (None, *SCHEDULES, *SEARCHED):
            raise ValueError(f"there is no schedule {name!r}. {did_you_mean(str(name), [*SCHEDULES, *SEARCHED])}")
        return name

    def logical_shards(self) -> int:
        """The number of logical shards that a batch is cut into; 0 if not deterministic."""
        return LOGICAL_SHARDS if self.deterministic is True else int(self.deterministic)

    @model_validator(mode="after")
    def _one_way_to_cut(self) -> Self:
        if self.deterministic and self.accumulate is not None:
            raise ValueError("accumulate has no meaning with deterministic, which cuts the batch in logical shards")
        if self.deterministic and self.threads is not None:
            raise ValueError("threads has no meaning with deterministic, which computes on one")
        if self.local_batch_size is None and self.global_batch_size is None:
            raise ValueError("give local_batch_size or global_batch_size")
        if self.eval_every and not self.evaluate:
            raise ValueError("eval_every has no meaning with evaluate = false: set it to 0, too (--train.eval_every 0)")
        return self


class Optimizer(ConfigSection):
    """The optimizer and its settings. Weight decay acts on matrices only. `max_norm` 0 turns clipping off."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Positive = 1e-3   # the peak learning rate
    betas: tuple[Fraction, Fraction] | None = Field(default=None, strict=False)   # adamw: (0.9, 0.95) when left out
    momentum: Fraction | None = None                                      # sgd: 0.9 when left out
    weight_decay: float = Field(default=0.1, ge=0)
    max_norm: float = Field(default=1.0, ge=0)
    base_batch_size: Count | None = None   # the batch that lr was chosen for
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"   # how lr scales with the batch

    @model_validator(mode="after")
    def _no_option_without_effect(self) -> Self:
        if self.name == "adamw" and self.momentum is not None:
            raise ValueError('momentum has no meaning with name = "adamw"; its first beta plays that part')
        if self.name == "sgd" and self.betas is not None:
            raise ValueError('betas have no meaning with name = "sgd"; give momentum')
        if (self.lr_scaling == "none") != (self.base_batch_size is None):
            raise ValueError('lr_scaling = "linear" or "sqrt" and base_batch_size need each other')
        return self


class LRSchedule(ConfigSection):
    """The learning rate over steps: warm-up, then decay to `min_lr_ratio` x lr."""

    warmup_steps: Whole = 0   # the file's is cut to the --train.steps of a shorter run
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr_ratio: float | None = Field(default=None, ge=0, le=1)   # 0.1 when left out

    @model_validator(mode="after")
    def _constant_has_no_floor(self) -> Self:
        if self.decay == "constant" and self.min_lr_ratio is not None:
            raise ValueError('min_lr_ratio has no meaning with decay = "constant"')
        return self


class Comm(ConfigSection):
    """How gradients are summed over ranks, which ranks share a node, and the seconds after which a silent rank ends the job."""

    all_reduce: Literal["backend", "auto", "naive", "tree", "double_tree", "ring", "halving", "hierarchical"] = "backend"
    compress: str = EXACT   # a name of base/compression.py; powersgd may have a rank: "powersgd:16"
    compress_after: Whole = 0   # how many first steps send exact gradients
    topology: str | None = Field(default=None, pattern=PRINTABLE)   # a cluster file; left out: as the launcher says
    backend: Literal["auto", "gloo", "rankloom"] = "auto"   # for CPU tensors; auto: shared memory if all ranks are on one host
    timeout: float = Field(default=300.0, gt=0, le=LONGEST_TIMEOUT)   # seconds

    @field_validator("compress")
    @classmethod
    def _known_compression(cls, compress: str) -> str:
        split_compression(compress)
        return compress

    @model_validator(mode="after")
    def _one_way_to_sum(self) -> Self:
        expect_compression(self.compress, self.all_reduce)
        expect_exact_steps(self.compress_after, self.compress)
        return self


class Checkpoint(ConfigSection):
    """The state of a run (train/state.py), written to its folder at intervals, after the last step, and when a signal ends the run."""

    interval: Whole = 0                    # steps between checkpoints; 0: none are written
    keep_latest: Count = 2                 # older ones are removed
    resume: str | None = Field(default=None, pattern=PRINTABLE)   # a run folder, or a checkpoint in it; settings are those of this config


class Config(ConfigSection):
    """A whole run. Every section except [train], which needs a batch size, may be left out."""

    run: Run = Run()
    mesh: MeshSection = MeshSection()
    model: Model = Model()
    data: Data = Data()
    train: Train = Field(default_factory=dict, validate_default=True)   # which says what is missing
    optimizer: Optimizer = Optimizer()
    schedule: LRSchedule = LRSchedule()
    comm: Comm = Comm()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.schedule.warmup_steps > self.train.steps:
            warmup, steps = self.schedule.warmup_steps, self.train.steps
            raise ValueError(f"[schedule] warmup_steps {warmup} is more than [train] steps {steps}: "
                             f"give --schedule.warmup_steps {steps} or less")
        if self.comm.compress_after >= self.train.steps and self.comm.compress != EXACT:
            raise ValueError(f"[comm] compress_after {self.comm.compress_after} leaves no step to compress of [train] steps "
                             f"{self.train.steps}")
        if self.data.baseline and not self.train.evaluate:
            raise ValueError("[data] baseline is compared with the validation loss: not with [train] evaluate = false. "
                             "It is true when left out: set it to false, too (--data.baseline false)")
        self._expect_stage_and_shard_fit()
        self._expect_no_conflicts()
        self._expect_experts_fit()
        of_bytes = self.data.tokenizer in (None, "bytes")
        self._expect_axes_fit(self.gpt(self.data.vocab_size or (BYTES_VOCAB if of_bytes else 1)))   # that of a .json is read later
        if self.mesh.is_known():
            self.batch()
        shards, ranks = self.train.logical_shards(), self.mesh.as_mesh().size   # the fewest ranks that there can be
        if shards and shards < ranks:
            raise ValueError(f"[train] deterministic has {shards} logical shards, which cannot feed {ranks} ranks")
        return self

    def _expect_stage_and_shard_fit(self) -> None:
        stage, replicate, shard = self.train.stage, self.mesh.replicate or 1, self.mesh.shard or 1
        if not stage and shard > 1:
            raise ValueError(f"[mesh] shard {shard} has no meaning with [train] stage 0, which cuts nothing: "
                             f"give --mesh.replicate {shard}, or a stage of 1, 2 or 3")
        if stage and shard == 1 and replicate > 1:
            raise ValueError(f"[train] stage {stage} cuts over [mesh] shard, which is 1: nothing would be cut; "
                             f"give --mesh.replicate 1 --mesh.shard {replicate}")
        reshard, unknown = self.train.reshard_after_forward, self.mesh.shard is None and not self.mesh.is_known()
        if shard % int(reshard or 1) and not unknown:
            raise ValueError(f"[train] reshard_after_forward {reshard} does not divide [mesh] shard {shard}")

    def _expect_no_conflicts(self) -> None:
        """Refuse options that `rl.prepare` would refuse together."""
        sections = {"comm": ("all_reduce", "compress", "compress_after"),
                    "train": ("deterministic", "pipe", "offload", "reshard_after_forward", "recompute", "offload_activations", "compile",
                              "tensor_overlap")}
        asked = {option: (section, getattr(getattr(self, section), option)) for section, options in sections.items() for option in options}
        values = {option: value for option, (_, value) in asked.items()}
        ranks = self.mesh.as_mesh().sizes() if self.mesh.is_known() else dict(self.mesh)
        values["float8"] = self.train.precision == "fp8"
        for option, reason in conflicts(values, stage=self.train.stage, ranks=ranks):
            section, value = asked[option]
            raise ValueError(f"[{section}] {option} = {json.dumps(value)} {reason}")

    def _expect_experts_fit(self) -> None:
        moe, ranks = self.model.moe, self.mesh.expert
        if ranks > 1 and moe is None:
            raise ValueError(f"[mesh] expert {ranks} spreads experts over ranks, and without [model.moe] there are none: "
                             "give --model.moe.experts, or --mesh.expert 1")
        if moe is not None:
            _expect_shared_evenly("[model.moe] experts", moe.experts, "expert", ranks)

    def _expect_axes_fit(self, shape: GPTConfig) -> None:
        pipe, context, tensor = self.mesh.pipe, self.mesh.context, self.mesh.tensor
        _expect_shared_evenly("[model] heads", shape.heads, "tensor", tensor)
        if shape.kv_heads % tensor and tensor % shape.kv_heads:
            raise ValueError(f"[model] kv_heads = {shape.kv_heads} and [mesh] tensor {tensor}: one must divide by the other, for a rank's "
                             "query heads to share its key-value heads")
        if shape.moe is None:
            _expect_shared_evenly("[model] ffn", shape.ffn, "tensor", tensor)
        if self.train.precision == "fp8" and (reason := float8_misfit(shape, tensor)):
            raise ValueError(f'[model] {reason}; take multiples of 16, or [train] precision = "bf16"')
        stages, pieces = pipe * stages_a_rank(self.train.pipe or "1f1b", None), shape.layers + 2
        if pipe > 1 and stages > pieces:
            raise ValueError(f"[mesh] pipe {pipe} needs {stages} stages for a model of {pieces} pieces: the embedding, {shape.layers} "
                             "layers and the output; each stage takes one piece or more")
        if self.train.seq_len < context:
            raise ValueError(f"[train] seq_len = {self.train.seq_len} leaves some of [mesh] context {context} ranks without a token")

    def gpt(self, tokenizer_vocab: int) -> GPTConfig:
        """The shape of the model; raises ConfigError when there is no such preset or shape, or too few tokens."""
        vocab_size = self.model.vocab_size or tokenizer_vocab
        if vocab_size < tokenizer_vocab:
            raise ConfigError(f"[model] vocab_size {vocab_size} is less than the {tokenizer_vocab} of the tokenizer")
        changes = self.model.overrides() | {"vocab_size": vocab_size, "seq_len": self.train.seq_len}
        return preset(self.model.preset, **changes)

    def batch(self) -> Batch:
        """The batch sizes on this config's ranks; raises BatchError when they contradict each other."""
        sizes = self.train
        return solve_batch(self.mesh.row_ranks(), sizes.local_batch_size, sizes.accumulate, sizes.global_batch_size, pipe=self.mesh.pipe)


def _expect_shared_evenly(key: str, count: int, axis: str, ranks: int) -> None:
    if count % ranks:
        raise ValueError(f"{key} = {count} cannot be shared evenly by [mesh] {axis} {ranks}: "
                         f"{count} / {ranks} = {count / ranks:.4g} on each rank; the axis must divide them")
