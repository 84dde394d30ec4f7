"""The fixed parts of a run on one rank: config, world, folder, data. Made once, before the first step."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import psutil
import torch

from rankloom.base.errors import ConfigError
from rankloom.base.events import Notice, Sink
from rankloom.comm.choose import AUTO, describe_decisions
from rankloom.data.arrays import Tokens
from rankloom.data.corpus import Corpus, prepare_corpus, tokenizer_hash
from rankloom.data.loader import TokenSamples
from rankloom.models.config import GPTConfig, MoEConfig, parameter_count
from rankloom.parallel.replicas.equal_start import expect_same_values
from rankloom.train.long_work import while_others_wait
from rankloom.train.run.folder import claim_run_folder, describe_environment, hold, no_empty_folder, write_json, write_run_config
from rankloom.train.run.schema import Config
from rankloom.world.launch import agent_mark, command, is_launched_here, restarts
from rankloom.world.world import World

SECONDS_BETWEEN_NOTICES = 2.0
CUT = {1: "optimizer state", 2: "optimizer state and gradients", 3: "optimizer state, gradients and parameters"}


@dataclass(frozen=True, slots=True)
class Job:
    """The fixed parts of a run on one rank; `sink` writes the journal and goes to the caller's sink."""

    config: Config
    world: World
    run: Path
    sink: Sink
    corpus: Corpus
    shape: GPTConfig

    def say(self, text: str) -> None:
        """Show a text to the user, once per job."""
        if self.world.rank == 0:
            self.sink(Notice(0, text))

    def samples(self, tokens: Tokens) -> TokenSamples:
        """Tokens cut into samples of the config's sequence length."""
        name = "validation tokens" if tokens is self.corpus.validation else "training tokens"
        return TokenSamples(tokens, self.config.train.seq_len, self.shape.vocab_size, name=name)


def open_run(config: Config, world: World) -> Path:
    """Rank 0 makes the run folder and writes what is known before the first step; all ranks learn the path.

    raises: ConfigError, on all ranks; StorageError when the folder cannot be made or written
    """
    counts, agent_marks = zip(*world.all_gather_object([restarts(), agent_mark()], label="restarts"))   # torchrun counts per node
    agents = sorted({mark for mark in agent_marks if mark})
    begin = partial(_begin, config, world, agents, again=any(counts)) if world.rank == 0 else None
    made = while_others_wait(world, begin, label="make the run folder")
    return Path(world.all_gather_object(made and str(made), label="run folder")[0])


def _begin(config: Config, world: World, agents: list[str], *, again: bool) -> Path:
    path = claim_run_folder(config, datetime.now(), again=again, agents=agents)
    batch = {"local": config.batch().local, "accumulate": config.batch().accumulate, "global": config.batch().global_}
    with no_empty_folder(path):
        if not is_launched_here():   # else the launcher holds it, and this rank has the config from there
            hold(path)
            write_run_config(config, path)
        write_json(path / "env.json", describe_environment(world, command()) | {"batch": batch, "agents": agents})
    return path


def open_corpus(config: Config, world: World, sink: Sink) -> Corpus:
    """Tokenise once per host, unless the cache has the result; then every rank maps the same file.

    raises: DataError, on all ranks, when there is no text or it cannot be read; ConfigError, on all ranks, when another host has other
            text under that name, or another tokenizer
    """
    data, report = config.data, reporter(sink, world.rank)

    def prepare_here() -> Corpus:
        return prepare_corpus(data.source, tokenizer=data.tokenizer or "bytes", vocab_size=data.vocab_size or 0,
                              validation=data.validation, cache=data.cache, seed=config.run.seed, progress=report)

    corpus = while_others_wait(world, prepare_here if world.local_rank == 0 else None, label="tokenise") or prepare_here()
    expect_same_values(world, "data", {
        "tokens for training": len(corpus.train), "tokens for validation": len(corpus.validation),
        "hash of the text": corpus.split, "hash of the tokenizer": corpus.tokenizer and tokenizer_hash(corpus.tokenizer)},
        f" text ({data.source}) and tokenizer: a host's copy may be older, and Python's own library differs between its versions")
    return corpus


def reporter(sink: Sink, rank: int) -> Callable[[str, float], None]:
    """A function for long work to report its progress to; it emits a notice every few seconds."""
    last = time.monotonic()

    def report(what: str, fraction: float) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_NOTICES:
            last = time.monotonic()
            sink(Notice(rank, f"{what}: {fraction:.0%}"))

    return report


def expect_room(job: Job) -> None:
    """Refuse a model that all hosts together have no room for: else the system would end a rank, or another program. A collective.

    However it is cut, some rank holds the value and the gradient of each parameter, 4 bytes each. That more fits is not said.
    raises: ConfigError, on all ranks
    """
    nbytes = psutil.virtual_memory().total + psutil.swap_memory().total if job.world.local_rank == 0 else 0   # one rank counts its host
    if job.world.device.type == "cuda":   # its own: Slurm may show it no other
        nbytes += torch.cuda.get_device_properties(job.world.device).total_memory
    room = sum(job.world.all_gather_object(nbytes, label="memory of the hosts"))
    count = parameter_count(job.shape)
    if 8 * count > room:
        raise ConfigError(f"the model has {count:,} parameters: their values and gradients alone take {8 * count / 2**30:,.0f} GiB, and "
                          f"all hosts with their GPUs have {room / 2**30:,.0f} GiB; choose a smaller model.preset, width or layers")


def _experts(moe: MoEConfig, layers: int, ranks: int) -> str:
    more = f", and {moe.shared} for every token" if moe.shared else ""
    room = f"; one takes at most {moe.capacity:g} times its even share of a row" if moe.capacity else ""
    return f"experts: {moe.experts} in each of {layers} blocks, {moe.top_k} for each token{more}; {moe.experts // ranks} on each rank{room}"


def introduce(job: Job) -> None:
    """Show which model is trained, on which data, in which batches."""
    batch, seq_len = job.config.batch(), job.config.train.seq_len
    job.say(f"model {job.config.model.preset}: {parameter_count(job.shape):,} parameters, with a vocabulary of {job.shape.vocab_size:,}; "
            f"data {job.corpus.source}: {len(job.corpus.train):,} tokens, and {len(job.corpus.validation):,} for validation")
    rows = f"rows of {seq_len} tokens: {batch.global_ * seq_len:,} tokens per step"
    job.say(f"batch: {batch.equation(job.config.mesh.row_ranks())} {rows}")
    mesh = job.config.mesh.as_mesh()
    shared = mesh.pipe * mesh.context * mesh.tensor > 1
    if shared or mesh.expert > 1:
        job.say(f"mesh: {mesh.product()}" + ("; ranks along pipe, context and tensor share their rows" if shared else ""))
    if job.shape.moe is not None:
        job.say(_experts(job.shape.moe, job.shape.layers, mesh.expert))
    if stage := job.config.train.stage:
        job.say(f"stage {stage}: {CUT[stage]} cut over {mesh.shard} ranks, repeated {mesh.replicate} times")
    if job.config.comm.all_reduce == AUTO:
        job.say(f"all-reduce on {job.world.topology}: {describe_decisions(job.world.topology)}")
