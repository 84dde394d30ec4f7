"""What a run leaves behind: weights, samples of text, the trigram model's loss beside the model's, a summary.

The weights come first: what may still go wrong after them cannot lose them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rankloom.base.errors import ConfigError
from rankloom.base.events import Saved
from rankloom.base.files import replacing
from rankloom.data.ngram import trigram_loss
from rankloom.models.config import parameter_count
from rankloom.train.engine import Engine
from rankloom.train.job import Job, reporter
from rankloom.train.long_work import while_others_wait
from rankloom.train.run_folder import write_json
from rankloom.train.samples import continue_texts, starts
from rankloom.train.stop import StopSignal
from rankloom.train.weights import load_model, save_model

BASELINE_TOKENS = 16_000_000   # the most that the trigram model counts, at about 40 bytes of memory each
PROMPT_TOKENS = 16   # of the validation text, which the model has not seen


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended; written as `summary.json`. Losses are in nats per token."""

    folder: str
    parameters: int
    steps: int                       # of the model
    steps_before: int                # those of the checkpoint that the run went on from; what follows is without them
    tokens: int                      # trained on, over all ranks
    training_seconds: float          # of the steps; evaluations are not counted
    training_loss: float | None      # of the last step
    validation_loss: float | None    # after the last step; None for a run that was stopped early
    trigram_loss: float | None
    stopped_by: int                  # the signal that ended the run early, or 0


def save_weights(job: Job, engine: Engine) -> None:
    """Rank 0 writes the weights, the others wait; raises ConfigError, on all ranks, when they cannot be written."""
    weights = engine.placement.values(0)   # not the optimizer's state, which is twice as much
    save = (lambda: _save(job, weights)) if job.world.rank == 0 else None
    while_others_wait(job.world, save, label="save the weights")


def finish_run(job: Job, outcome: Mapping[str, Any], stop: StopSignal) -> Summary:
    """Write what is left of a run once the weights are on disk; `outcome` has the fields of Summary that the steps know.

    Only rank 0 writes, and only rank 0 knows the trigram's loss. A run that a signal ended leaves the rest out, and what a
    signal now breaks off; the summary is there in any case.
    """
    trigram = None

    def rest() -> None:
        nonlocal trigram
        trigram = _compare(job, outcome["validation_loss"])
        _write_samples(job)

    try:
        if job.world.rank == 0 and not outcome["stopped_by"]:
            stop.run_unless_stopped(rest)
    finally:
        facts = {**outcome, "trigram_loss": trigram, "stopped_by": outcome["stopped_by"] or stop.number}
        summary = Summary(folder=str(job.run), parameters=parameter_count(job.shape), **facts)
        if job.world.rank == 0:
            write_json(job.run / "summary.json", asdict(summary))
    return summary


def _save(job: Job, weights: Mapping[str, torch.Tensor]) -> None:
    job.run.mkdir(parents=True, exist_ok=True)   # who removed it meanwhile does not lose the weights too
    job.sink(Saved(0, str(save_model(job.run, weights, job.shape, job.corpus.tokenizer))))


def _compare(job: Job, validation_loss: float | None) -> float | None:
    """The trigram model's validation loss, said beside the model's."""
    if not job.config.data.baseline or validation_loss is None:
        return None
    baseline = trigram_loss(
        job.corpus.train, job.corpus.validation, job.shape.vocab_size, max_tokens=BASELINE_TOKENS,
        progress=reporter(job.sink, 0),
    )
    winner = "the model is better" if validation_loss < baseline.loss else "the TRIGRAM is better: train longer"
    job.say(
        f"validation loss {validation_loss:.4f}, that of a trigram model of the same text {baseline.loss:.4f} "
        f"(of {baseline.train_tokens:,} training tokens): {winner}"
    )
    return baseline.loss


def _write_samples(job: Job) -> None:
    """Let the weights on disk go on with a few starts of validation text."""
    train, tokenizer, path = job.config.train, job.corpus.tokenizer, job.run / "samples.txt"
    if tokenizer is None or not train.samples:
        return
    model, _ = load_model(job.run, job.world.device)
    prompts = starts(job.corpus.validation, train.samples, min(PROMPT_TOKENS, train.seq_len))
    texts = continue_texts(model, tokenizer, prompts, max_tokens=train.sample_tokens, seed=job.config.run.seed)
    job.say("\n".join(f"sample {number}: {text}" for number, text in enumerate(texts, 1)))
    try:
        with replacing(path) as temporary:
            temporary.write_text("\n\n---\n\n".join(texts) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
    job.sink(Saved(0, str(path)))
