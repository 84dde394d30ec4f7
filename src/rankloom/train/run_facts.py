"""What the checkpoints of a run say of it besides its state: its tokenizer, its model, its rates. A run that goes on is held to the first
two, which no shape of a tensor tells, and says what else differs.

Read train/resume.py for who asks. Checkpoints of `engine.save`, and older ones, say nothing: then nothing is compared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rankloom.data.corpus import tokenizer_hash
from rankloom.models.config import GPTConfig
from rankloom.train.config import shared_settings
from rankloom.train.job import Job
from rankloom.train.schema import Config

NONE = "none"   # as the command line takes a section out
FREE = ("dropout", "seq_len", "moe.capacity", "moe.balance_loss", "moe.router_z_loss", "moe.bias_rate")   # of a model, and no part of it
TOLD = ("train.steps", "train.seq_len", "run.seed", "model.dropout", "comm.compress")   # besides [optimizer], [schedule] and the batch


def facts_of_run(job: Job) -> dict[str, Any]:
    """What a checkpoint says of a run: JSON, the same on all ranks."""
    tokenizer = job.corpus.tokenizer
    return {"tokenizer_sha256": None if tokenizer is None else tokenizer_hash(tokenizer), "model": model_settings(job.shape),
            "settings": told_settings(job.config)}


def model_settings(shape: GPTConfig) -> dict[str, Any]:
    """What decides what a model computes from its weights, by name.

    >>> model_settings(GPTConfig(kv_heads=4))["kv_heads"]
    4
    """
    flat = asdict(shape)
    experts = {f"moe.{key}": value for key, value in (flat.pop("moe") or {"experts": NONE}).items()}
    return {key: value for key, value in (experts | flat).items() if key not in FREE}


def told_settings(config: Config) -> dict[str, Any]:
    """What decides how a run trains, as JSON has it."""
    said = {key: list(value) if isinstance(value, tuple) else value for key, value in shared_settings(config).items()
            if key in TOLD or key.startswith(("optimizer.", "schedule."))}
    return said | {"train.global_batch_size": config.batch().global_}


def misfit_of_run(path: Path, saved: Mapping[str, Any], job: Job) -> str | None:
    """Why a run cannot go on from the checkpoint in `path`, which says `saved` of its own; in words, or None."""
    mine = facts_of_run(job)
    now, before = mine["tokenizer_sha256"], saved.get("tokenizer_sha256")
    if now and before and now != before:   # an array of tokens may come without one
        file, name = path.parent.parent / "tokenizer.json", job.config.data.tokenizer or "bytes"
        learned = ", which learns from the text for training: that, or vocab_size, has changed" if name == "bpe" else ""
        return (f"{path}: was trained with another tokenizer (SHA-256 {before[:12]}..., this run's is {now[:12]}...), so its weights would "
                f"take tokens for others. [data] tokenizer = {name!r}{learned}; give --data.tokenizer "
                f"{file if file.exists() else 'with the tokenizer.json of that run'}")
    for key, here, there in _differences(mine["model"], saved.get("model", {})):
        flag = f"--model.moe {NONE}" if there == NONE else f"--model.{key} {_word(there)}"
        return f"{path}: is of a model with [model] {key} = {there}, and this one has {here}; give {flag}"
    return None


def changes_of_run(saved: Mapping[str, Any], config: Config) -> str:
    """What else is not as in the run that `saved` is of, in words; empty where all is."""
    found = _differences(told_settings(config), saved.get("settings", {}))
    return ", ".join(f"{key} {_word(before)} -> {_word(now)}" for key, now, before in found)


def _differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What both say, and say otherwise."""
    return ((key, value, before[key]) for key, value in now.items() if key in before and before[key] != value)


def _word(value: Any) -> str:
    return "(left out)" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
