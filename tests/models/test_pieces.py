"""A GPT in pieces, one after the other, is the model. What stages make of them is in tests/parallel/pipeline and tests/train/pipeline."""

import pytest
import torch

from rankloom.base.errors import ConfigError
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import loss_and_gradient
from rankloom.models.pieces import gpt_answer, gpt_pieces
from rankloom.models.sequence_part import WHOLE

SHAPE = GPTConfig(vocab_size=37, seq_len=12, width=16, layers=2, heads=4, kv_heads=2, ffn=24, dropout=0.3)
TOKENS = torch.arange(24).view(2, 12)


def test_pieces_drop_what_the_model_drops_and_take_its_loss_kernel():
    model, calls = GPT(SHAPE), []
    model.loss_kernel = lambda *given: calls.append(1) or loss_and_gradient(*given)
    torch.manual_seed(0)
    whole = model(TOKENS, targets=TOKENS)
    torch.manual_seed(0)
    x = TOKENS
    for _, run in gpt_pieces(model):
        x = run(x)
    assert gpt_answer(model)(x, TOKENS) == whole and len(calls) == 2


def test_a_model_that_cuts_its_own_tokens_is_in_pieces_only_for_who_says_which_tokens_they_are():
    def cut(module, args):
        return args

    model, cut.cuts_tokens = GPT(SHAPE), True
    model.register_forward_pre_hook(cut)
    with pytest.raises(ConfigError, match="the model is context parallel"):
        gpt_pieces(model)
    assert len(gpt_pieces(model, part=lambda: WHOLE)) == 4
