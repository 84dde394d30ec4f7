"""A whole run on one rank: steps, evaluations, and the files written at the end.

Every rank calls `train` with the same config. An error that is found here on one rank (a full disk, a folder that cannot be written,
a file that is not text) is raised on all ranks together, so that no rank waits for another.
Read job.py before this file, ../engine.py for what one step does, stop.py for how a run ends early, finish.py for its end.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from rankloom.base.errors import ConfigError, StorageError
from rankloom.base.events import Evaluated, Event, Notice, Sink
from rankloom.base.mesh import SHARING_AXES
from rankloom.data.loader import Batch, Loader, evaluation_batches
from rankloom.models.config import GPTConfig, parameter_count
from rankloom.models.gpt import GPT, initial_values
from rankloom.models.loss import language_model_loss
from rankloom.parallel.replicas.equal_start import expect_same_values
from rankloom.train.engine import Engine
from rankloom.train.prepare import prepare
from rankloom.train.run.config import shared_settings, with_ranks
from rankloom.train.run.finish import Summary, finish_run, save_weights
from rankloom.train.run.folder import Journal
from rankloom.train.run.job import Job, expect_room, introduce, open_corpus, open_run
from rankloom.train.run.optim import build_optimizer, schedule
from rankloom.train.run.resume import resume, save_in_run
from rankloom.train.run.schema import Config
from rankloom.train.run.stop import Agreement, StopSignal
from rankloom.train.split_model import is_split
from rankloom.world.group import Group
from rankloom.world.world import World


def train(config: Config, world: World, sink: Sink) -> Summary:
    """Train as `config` says, as one of the ranks of `world`; every rank returns the same losses.

    sink:   called with this rank's events; display those of one rank only
    raises: ConfigError, DataError, on all ranks together; what a step raises
    """
    config = with_ranks(config, world.size)
    expect_same_values(world, "config", shared_settings(config))
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    run = open_run(config, world)
    with Journal(run, world.rank) as journal:

        def both(event: Event) -> None:
            journal(event)
            sink(event)

        world.agree(journal.problem, error=StorageError, label="open the journals")
        if world.rank == 0:   # before the text is tokenised, which may take long, and be stopped
            both(Notice(0, f"run folder: {run}"))
        corpus = open_corpus(config, world, both)
        job = Job(config, world, run, both, corpus, config.gpt(corpus.vocab_size))
        introduce(job)
        expect_room(job)
        if config.train.evaluate:
            job.samples(corpus.validation)   # raises now, not after the last step, if the text is too short
        stepper = Stepper(job, journal)
        with stepper.stop:   # a signal after the last step also waits until the weights are saved
            stepper.run()
            save_weights(job, stepper.engine)   # first: there may be no time or room for a last checkpoint, which is larger
            stepper.save_rest()
            return finish_run(job, stepper.outcome(), stepper.stop)


class Stepper:
    """The changing state of a run: its progress, its last measurements, and whether it should stop."""

    def __init__(self, job: Job, journal: Journal):
        self.job, self.journal = job, journal
        self.engine = build_engine(job.config, job.shape, job.world, job.sink)
        resume(job, self.engine)
        self.steps_before = self.engine.steps_done
        self.stop, self.agreement = StopSignal(self._acknowledge), Agreement(job.world)
        self.signal = 0                           # agreed on by all ranks; 0: none
        self.tokens, self.seconds = 0, 0.0        # tokens trained on, over all ranks; seconds in steps
        self.loss: float | None = None
        self.validation: float | None = None

    def run(self) -> None:
        """All steps and the last evaluation, or as much of them as a signal allows."""
        job, train = self.job, self.job.config.train
        with Loader(job.samples(job.corpus.train), global_batch=job.config.batch().global_, rank=self.engine.group.rank,
                    ranks=self.engine.group.size, seed=job.config.run.seed, start_step=self.engine.steps_done, steps=train.steps,
                    device=job.world.device) as loader:
            self._steps(loader)
            if train.evaluate and not self.signal:
                self._evaluate()

    def save_rest(self) -> None:
        """Write a checkpoint of the last step, unless the interval has written it."""
        interval = self.job.config.checkpoint.interval
        if interval and self.engine.steps_done % interval:
            save_in_run(self.job, self.engine)

    def outcome(self) -> Summary:
        """What the steps came to, before the comparison with the trigram model."""
        return Summary(
            folder=str(self.job.run), parameters=parameter_count(self.job.shape), steps=self.engine.steps_done,
            steps_before=self.steps_before, tokens=self.tokens, training_seconds=self.seconds, training_loss=self.loss,
            validation_loss=None if self.signal else self.validation, trigram_loss=None, stopped_by=self.signal or self.stop.number,
        )

    def _steps(self, loader: Iterator[Batch]) -> None:
        """Run steps until the last one, a signal or a problem. All ranks stop after the same step."""
        every, steps, interval = self.job.config.train.eval_every, self.job.config.train.steps, self.job.config.checkpoint.interval
        for batch in loader:
            report = self.engine.step(batch)
            self.loss, self.tokens, self.seconds = report.loss, self.tokens + int(report.count), self.seconds + report.seconds
            done = self.engine.steps_done
            if every and done % every == 0 and done < steps:
                self._evaluate()
            if interval and done % interval == 0:
                self._or_keep_weights(lambda: save_in_run(self.job, self.engine))
            number, problem = self.agreement.exchange(self.stop.number, self.journal.problem is not None)
            self.signal = self.signal or number
            if self.signal or problem:
                break
        self.signal = self.signal or self.agreement.last()[0]
        self._or_keep_weights(lambda: self.job.world.agree(self.journal.problem, error=StorageError, label="write the journals"))

    def _acknowledge(self, number: int) -> None:
        """Say what happens after a signal, and after a second one. One that closed the terminal has no reader."""
        if number != signal.SIGHUP:
            soon = "stopping after this step" if self.engine.steps_done < self.job.config.train.steps else "stopping"
            again = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self.job.say(f"{soon}; {again} again quits at once, without saving")

    def _or_keep_weights(self, work: Callable[[], None]) -> None:
        """Run `work`. If it raises ConfigError, on all ranks or none, save the weights first: they may still fit on the disk."""
        try:
            work()
        except ConfigError:
            with suppress(ConfigError):   # report the first error
                save_weights(self.job, self.engine)
            raise

    def _evaluate(self) -> None:
        """Measure the exact validation loss and emit it as an event; neither when a signal on any rank stops the evaluation."""
        job, world, rows = self.job, self.job.world, self.engine.group
        batches = evaluation_batches(job.samples(job.corpus.validation), rows=evaluation_rows(job), rank=rows.rank, ranks=rows.size,
                                     device=world.device)
        result = self.engine.evaluate(self._until_signal(batches))
        self.signal = self._signal_of(world)
        if not self.signal:
            self.validation = result.loss
            job.sink(Evaluated(world.rank, self.engine.steps_done, result.loss, result.count))

    def _until_signal(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        sharing = self.job.world.group(*SHARING_AXES)   # they share each forward, so they must stop at the same batch
        for batch in batches:
            yield batch   # at least one, so that the count is not 0
            if self._signal_of(sharing):
                return

    def _signal_of(self, group: Group) -> int:
        """The signal that any rank of the group has received, or 0. A collective."""
        if group.size == 1:
            return self.stop.number
        here = torch.tensor([float(self.stop.number)], dtype=torch.float32, device=group.device)
        return int(group.all_reduce(here, op="max", label="cut short?").item())


def evaluation_rows(job: Job) -> int:
    """Rows per evaluation batch: those of a training micro-batch. Deterministic: a number that does not depend on the ranks."""
    batch, shards = job.config.batch(), job.config.train.logical_shards()
    return max(1, batch.global_ // shards) if shards else batch.local


def build_engine(config: Config, shape: GPTConfig, world: World, sink: Sink | None = None) -> Engine:
    """Build the model and its engine from the config."""
    given, comm = config.train, config.comm
    cut = given.stage == 3 or is_split(world)   # no rank ever holds the whole model
    model = GPT(shape, seed=config.run.seed, device="meta" if cut else world.device)
    return prepare(model, loss=language_model_loss, optimizer=lambda params: build_optimizer(config.optimizer, params), world=world,
                   stage=given.stage, accumulate=config.batch().accumulate, clip=config.optimizer.max_norm or None, seed=config.run.seed,
                   precision=given.precision, deterministic=given.deterministic, schedule=schedule(config), all_reduce=comm.all_reduce,
                   compress=comm.compress, compress_after=comm.compress_after, offload=given.offload, recompute=given.recompute,
                   initialize=initial_values(model, config.run.seed) if cut else None, offload_activations=given.offload_activations,
                   compile=given.compile, reshard_after_forward=given.reshard_after_forward, pipe=given.pipe,
                   tensor_overlap=given.tensor_overlap, sink=sink)
