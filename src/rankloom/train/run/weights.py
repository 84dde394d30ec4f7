"""A trained model on disk: `model.safetensors`, its shape in `model.json`, its tokenizer in `tokenizer.json`.

Each file is written whole or not at all, the weights last: if they exist, so do the other two.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rankloom.base.errors import DataError, ModelMismatch, StorageError
from rankloom.base.files import expanded, replacing
from rankloom.data.tokenizer import Tokenizer, load_tokenizer
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.train.run.folder import write_json


def save_model(run: Path, weights: Mapping[str, Tensor], config: GPTConfig, tokenizer: Tokenizer | None) -> Path:
    """Write the files into a run folder (no tokenizer for a model of token arrays); returns the path of the weights.

    raises: StorageError that names the file that cannot be written
    """
    write_json(run / "model.json", dataclasses.asdict(config))
    path = run / "model.safetensors"
    try:
        save_tokenizer(run, tokenizer)
        with replacing(path) as temporary:
            save_file({name: t.detach().cpu().contiguous() for name, t in weights.items()}, temporary)
            temporary.chmod(run.stat().st_mode & 0o666)   # safetensors makes it readable for its owner only
    except (OSError, DataError, SafetensorError) as error:
        raise StorageError(f"{run}: the weights cannot be written ({error})") from None
    return path


def save_tokenizer(run: Path, tokenizer: Tokenizer | None) -> None:
    """Write `tokenizer.json`, if there is a tokenizer. raises: OSError, DataError"""
    if tokenizer is not None:
        with replacing(run / "tokenizer.json") as temporary:
            tokenizer.save(temporary)


def load_model(run: Path, device: torch.device | str = "cpu") -> tuple[GPT, Tokenizer | None]:
    """The model of a run folder, ready to generate, and its tokenizer, if it has one.

    raises: DataError when a file is missing or damaged; ModelMismatch when the weights do not have the shapes of `model.json`
    """
    run = expanded(run)
    try:
        if not run.is_dir():
            raise DataError(f"{run}: is a file; name its run folder, {run.parent}" if run.exists() else f"{run}: no such run folder")
        weights = load_file(run / "model.safetensors")
    except FileNotFoundError:
        raise DataError(f"{run}: holds no model.safetensors; did the run finish?") from None
    except (OSError, SafetensorError) as error:
        raise DataError(f"{run / 'model.safetensors'}: cannot be read ({error})") from None
    kinds = {tensor.dtype for tensor in weights.values()}   # rotary tables are not saved; an fp64 model makes its own in fp64
    model = GPT(_read_shape(run / "model.json"), device="meta", dtype=torch.float64 if torch.float64 in kinds else torch.float32)
    _expect_same_tensors(model, weights, run)
    model.load_state_dict(weights, assign=True)
    tokenizer = run / "tokenizer.json"
    return model.to(device).eval(), load_tokenizer(tokenizer) if tokenizer.exists() else None


def _read_shape(path: Path) -> GPTConfig:
    try:
        fields: Any = json.loads(path.read_text(encoding="utf-8"))
        return GPTConfig(**fields)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: does not tell the shape of the model ({error})") from None


def _expect_same_tensors(model: GPT, weights: Mapping[str, Tensor], run: Path) -> None:
    expected = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ModelMismatch(f"{run}: tensor {name} has shape {found.get(name)} in model.safetensors, and model.json expects "
                                f"{expected.get(name)}; these are not the files of one run")
