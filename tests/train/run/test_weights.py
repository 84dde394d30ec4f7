"""A model that was saved comes back equal, and what is damaged is named."""

import json
from pathlib import Path

import pytest
import torch

from rankloom.base.errors import ConfigError, DataError, ModelMismatch
from rankloom.data.tokenizer import ByteTokenizer
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.train.run.weights import load_model, save_model

SHAPE = GPTConfig(vocab_size=257, seq_len=16, width=16, layers=1, heads=2, kv_heads=1, ffn=16, tie=True)


@pytest.fixture
def saved(tmp_path):
    model = GPT(SHAPE, seed=3)
    save_model(tmp_path, model.state_dict(), SHAPE, ByteTokenizer())
    return tmp_path


@pytest.mark.parametrize("tie", [True, False])
def test_a_saved_model_comes_back_equal(tmp_path, tie):
    shape = GPTConfig(vocab_size=257, seq_len=16, width=16, layers=2, heads=2, kv_heads=1, ffn=16, tie=tie)
    model, tokens = GPT(shape, seed=3), torch.arange(10)[None]
    save_model(tmp_path, model.state_dict(), shape, ByteTokenizer())
    loaded, tokenizer = load_model(tmp_path)
    assert loaded.config == shape
    assert torch.equal(loaded(tokens), model(tokens))
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_in_another_dtype_comes_back_with_the_tables_of_that(tmp_path, dtype):
    model, tokens = GPT(SHAPE, seed=3, dtype=dtype), torch.arange(16)[None]
    save_model(tmp_path, model.state_dict(), SHAPE, None)
    loaded, _ = load_model(tmp_path)
    assert loaded.rotary.cos.dtype == model.rotary.cos.dtype
    assert torch.equal(loaded(tokens), model(tokens))


def test_a_model_of_token_arrays_has_no_tokenizer(tmp_path):
    save_model(tmp_path, GPT(SHAPE).state_dict(), SHAPE, None)
    assert load_model(tmp_path)[1] is None


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(DataError, match="no such run folder"):
        load_model(tmp_path / "nothing")
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(DataError, match=f"model.bin: is a file; name its run folder, {tmp_path}$"):
        load_model(tmp_path / "model.bin")
    with pytest.raises(DataError, match=r"holds no model.safetensors; did the run finish"):
        load_model(tmp_path)


def test_a_folder_that_may_not_be_read_is_named(saved, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(DataError, match=r"model.safetensors: cannot be read .*Permission denied"):
        load_model(saved)


def test_weights_that_were_cut_are_named(saved):
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"model.safetensors: cannot be read"):
        load_model(saved)


@pytest.mark.parametrize("text", ["{", "[]", '{"width": 7}', '{"surprise": 1}', "null"])
def test_a_shape_that_is_none_is_named(saved, text):
    (saved / "model.json").write_text(text)
    with pytest.raises((DataError, ModelMismatch), match="model"):
        load_model(saved)


def test_weights_of_another_shape_are_named_with_the_tensor(saved):
    shape = json.loads((saved / "model.json").read_text()) | {"ffn": 32}
    (saved / "model.json").write_text(json.dumps(shape))
    with pytest.raises(ModelMismatch, match=r"tensor blocks.0.mlp.down.weight has shape \(16, 16\) .*expects \(16, 32\)"):
        load_model(saved)


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        save_model(tmp_path / "nothing", GPT(SHAPE).state_dict(), SHAPE, ByteTokenizer())
