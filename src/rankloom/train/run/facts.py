"""Facts about a run in its checkpoints: its tokenizer, its model, its settings. A resumed run must have the same tokenizer, model
and kind of optimizer.

Tensor shapes do not show these. Other differences are only reported. train/run/resume.py uses this file. Checkpoints of `engine.save`, and
older ones, have no such facts: then nothing is compared.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rankloom.base.errors import DataError
from rankloom.data.corpus import tokenizer_hash
from rankloom.data.tokenizer import load_tokenizer
from rankloom.models.config import GPTConfig
from rankloom.train.run.config import shared_settings
from rankloom.train.run.job import Job
from rankloom.train.run.schema import Config

NONE = "none"   # the command-line word that removes a section
# Of the model: a resumed run may have others.
MAY_DIFFER = ("dropout", "seq_len", "moe.capacity", "moe.balance_loss", "moe.router_z_loss", "moe.bias_rate")
# A resumed run reports where these differ; also [optimizer], [schedule], the batch, and what of [model.moe] may differ.
REPORTED = ("train.steps", "train.seq_len", "train.precision", "train.deterministic", "run.seed", "data.validation", "model.dropout",
            "comm.compress", "comm.compress_after")


def facts_of_run(job: Job) -> dict[str, Any]:
    """The facts about a run for its checkpoints: JSON, the same on all ranks."""
    tokenizer = job.corpus.tokenizer
    return {"tokenizer_sha256": None if tokenizer is None else tokenizer_hash(tokenizer), "model": model_settings(job.shape),
            "settings": training_settings(job.config), "split": job.corpus.split}


def model_settings(shape: GPTConfig) -> dict[str, Any]:
    """The settings that decide what a model computes from its weights, by name.

    >>> model_settings(GPTConfig(kv_heads=4))["kv_heads"]
    4
    """
    flat = asdict(shape)
    experts = {f"moe.{key}": value for key, value in (flat.pop("moe") or {"experts": NONE}).items()}
    return {key: value for key, value in (experts | flat).items() if key not in MAY_DIFFER}


def training_settings(config: Config) -> dict[str, Any]:
    """The settings that decide how a run trains, for JSON."""
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in shared_settings(config).items()
                if key in REPORTED or key.startswith(("optimizer.", "schedule."))}
    moe = config.model.moe.model_dump() if config.model.moe else {}
    experts = {f"model.moe.{key}": value for key, value in moe.items() if f"moe.{key}" in MAY_DIFFER}
    return settings | experts | {"train.global_batch_size": config.batch().global_}


def run_of(checkpoint: Path) -> Path:
    """The run folder that a checkpoint lies in, also of one that is named from inside of that folder, as `step-00000200` or `.`."""
    return Path(os.path.abspath(checkpoint)).parent.parent


def misfit_of_run(path: Path, saved: Mapping[str, Any], job: Job) -> str | None:
    """Why a run cannot resume from the checkpoint in `path`, in words, or None. saved: the facts in the checkpoint"""
    facts = facts_of_run(job)
    now, before = facts["tokenizer_sha256"], saved.get("tokenizer_sha256")
    file = run_of(path) / "tokenizer.json"
    if now and before and now != before and not _is_tokenizer(file, now):   # an array of tokens may have no tokenizer
        name = job.config.data.tokenizer or "bytes"
        learned = ", which learns from the text for training: that, or vocab_size, has changed" if name == "bpe" else ""
        return (f"{path}: was trained with another tokenizer (SHA-256 {before[:12]}..., this run's is {now[:12]}...), so its weights would "
                f"take tokens for others. [data] tokenizer = {name!r}{learned}; give --data.tokenizer "
                f"{file if file.exists() else 'with the tokenizer.json of that run'}")
    if of_model := next(_differences(facts["model"], saved.get("model", {})), None):
        flag = f"--model.moe {NONE}" if of_model.before == NONE else f"--model.{of_model.key} {_word(of_model.before)}"
        return f"{path}: is of a model with [model] {of_model.key} = {of_model.before}, and this one has {of_model.now}; give {flag}"
    now, before = (settings.get("model.moe.bias_rate") for settings in (facts["settings"], saved.get("settings", {})))
    if None not in (now, before) and bool(now) != bool(before):   # any rate above 0: routers have biases, which are tensors of the model
        return (f"{path}: is of a model with{'' if before else 'out'} biases of routers, [model] moe.bias_rate = {before}, and this one "
                f"has {now}; give --model.moe.bias_rate {before}")
    now, before = (settings.get("optimizer.name") for settings in (facts["settings"], saved.get("settings", {})))
    if before and now != before:
        return f"{path}: has the state of [optimizer] name = {before}, which is none for {now}; give --optimizer.name {before}"
    return None


def _is_tokenizer(file: Path, sha256: str) -> bool:
    """Whether the file holds this tokenizer: another release of `tokenizers` may write, and so hash, the same one otherwise."""
    try:
        return file.exists() and tokenizer_hash(load_tokenizer(file)) == sha256
    except (DataError, OSError):
        return False


def changes_of_run(saved: Mapping[str, Any], config: Config) -> dict[str, str]:
    """The other settings that differ from those in `saved`: their old and new values in words, by name."""
    found = _differences(training_settings(config), saved.get("settings", {}))
    return {each.key: f"{_word(each.before)} -> {_word(each.now)}" for each in found}


class Difference(NamedTuple):
    """A setting that this run and that of a checkpoint have with other values."""

    key: str
    now: Any
    before: Any


def _differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[Difference]:
    """The settings in both that differ."""
    return (Difference(key, value, before[key]) for key, value in now.items() if key in before and before[key] != value)


def _word(value: Any) -> str:
    return "(left out)" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
