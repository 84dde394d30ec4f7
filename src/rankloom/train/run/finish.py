"""What a run writes at its end: weights, samples of text, a comparison with a trigram model, a summary.

The weights come first, so that a later error cannot lose them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import Signals

import torch

from rankloom.base.errors import DataError, NonFinite, StorageError
from rankloom.base.events import Saved
from rankloom.base.files import saving
from rankloom.base.quantities import show_seconds
from rankloom.data.ngram import trigram_loss
from rankloom.train.engine import Engine
from rankloom.train.long_work import while_others_wait
from rankloom.train.run.folder import write_json
from rankloom.train.run.job import Job, reporter
from rankloom.train.run.resume import say_how_to_resume
from rankloom.train.run.samples import continue_texts, starts
from rankloom.train.run.stop import StopSignal
from rankloom.train.run.weights import load_model, save_model

BASELINE_TOKENS = 16_000_000   # at most this many are counted, at about 40 bytes of memory each
PROMPT_TOKENS = 16   # of the validation text, which the model has not seen


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended; written as `summary.json`. Losses are in nats per token."""

    folder: str
    parameters: int
    steps: int                       # of the model
    steps_before: int                # steps of the checkpoint it resumed from; the fields below do not include them
    tokens: int                      # trained on, over all ranks
    training_seconds: float          # in steps, without evaluations
    training_loss: float | None      # of the last step
    validation_loss: float | None    # after the last step; None for a run that was stopped early
    trigram_loss: float | None       # known on rank 0 at the end
    stopped_by: int                  # the signal that ended the run early, or 0


def save_weights(job: Job, engine: Engine) -> None:
    """Rank 0 writes the weights while the others wait. Raises StorageError, on all ranks, when they cannot be written."""
    weights = engine.placement.values(0)   # without the optimizer's state, which is twice as large
    save = (lambda: _save(job, weights)) if job.world.rank == 0 else None
    while_others_wait(job.world, save, label="save the weights")


def finish_run(job: Job, summary: Summary, stop: StopSignal) -> Summary:
    """After the weights: write the comparison, the samples and the summary. summary: what is known after the steps

    Only rank 0 writes, and only rank 0 knows the trigram model's loss. A run that a signal ended writes the summary only; a signal during
    this function skips what is left, but not the summary.
    """
    trigram = None

    def rest() -> None:
        nonlocal trigram
        trigram = _compare(job, summary.validation_loss)
        _write_samples(job)

    try:
        if job.world.rank == 0 and not summary.stopped_by:
            stop.run_unless_stopped(rest)
    finally:
        summary = replace(summary, trigram_loss=trigram, stopped_by=summary.stopped_by or stop.number)
        if job.world.rank == 0:
            write_json(job.run / "summary.json", asdict(summary))
    return summary


def describe_end(summary: Summary, steps: int) -> list[str]:
    """Lines for the user: what stopped the run, how to resume it, its steps and their pace. steps: those asked for"""
    lines = []
    if summary.stopped_by:
        lines.append(f"stopped by {Signals(summary.stopped_by).name} after {summary.steps} steps; the weights are saved")
        lines += say_how_to_resume(Path(summary.folder), steps - summary.steps)
    rate = summary.tokens / summary.training_seconds if summary.training_seconds else 0.0
    if summary.steps_before == summary.steps:
        return [*lines, f"nothing was left to train after step {summary.steps}"]
    done = f"{summary.steps} steps" if not summary.steps_before else f"steps {summary.steps_before + 1} to {summary.steps}"
    return [*lines, f"{done}, {summary.tokens:,} tokens in {show_seconds(summary.training_seconds)} ({rate:,.0f} tokens/s)"]


def _save(job: Job, weights: Mapping[str, torch.Tensor]) -> None:
    try:
        job.run.mkdir(parents=True, exist_ok=True)   # the user may have removed the folder: do not lose the weights
    except OSError as error:
        raise StorageError(f"{job.run}: the weights cannot be written ({error})") from None
    job.sink(Saved(0, str(save_model(job.run, weights, job.shape, job.corpus.tokenizer))))


def _compare(job: Job, validation_loss: float | None) -> float | None:
    """Show the trigram model's validation loss beside the model's, and return it."""
    if not job.config.data.baseline or validation_loss is None:
        return None
    try:
        baseline = trigram_loss(job.corpus.train, job.corpus.validation, job.shape.vocab_size, max_tokens=BASELINE_TOKENS,
                                progress=reporter(job.sink, 0))
    except DataError as error:   # the run itself is done
        job.say(f"no trigram model to compare with: {error}")
        return None
    winner = "the model is better" if validation_loss < baseline.loss else "the TRIGRAM is better: train longer"
    job.say(f"validation loss {validation_loss:.4f}, that of a trigram model of the same text {baseline.loss:.4f} "
            f"(of {baseline.train_tokens:,} training tokens): {winner}")
    return baseline.loss


def _write_samples(job: Job) -> None:
    """Continue a few beginnings of validation text with the saved weights."""
    train, tokenizer, path = job.config.train, job.corpus.tokenizer, job.run / "samples.txt"
    if tokenizer is None or not train.samples:
        return
    model, _ = load_model(job.run, job.world.device)
    prompts = starts(job.corpus.validation, train.samples, min(PROMPT_TOKENS, train.seq_len))
    try:
        texts = continue_texts(model, tokenizer, prompts, max_tokens=train.sample_tokens, seed=job.config.run.seed)
    except NonFinite as error:   # the weights are saved, and the summary is still to come
        job.say(f"no samples: {error}")
        return
    job.say("samples: validation text >> what the model writes after it")
    marked = [f"{begin} >> {text.removeprefix(begin)}" for begin, text in zip(map(tokenizer.decode, prompts), texts)]
    job.say("\n".join(f"sample {number}: {text}" for number, text in enumerate(marked, 1)))
    with saving(path) as temporary:
        temporary.write_text("\n\n---\n\n".join(texts) + "\n", encoding="utf-8")
    job.sink(Saved(0, str(path)))
