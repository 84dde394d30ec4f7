"""Generate text with a trained GPT, one token at a time, with a key-value cache."""

from math import inf
from numbers import Integral
from types import NoneType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rankloom.base.errors import ConfigError, DataError, NonFinite
from rankloom.base.expect import expect_type
from rankloom.base.modes import evaluating, runs_together
from rankloom.base.rng import stream
from rankloom.models.gpt import GPT, KVCache, check_tokens

# All but cuDNN's: torch prefers it on Hopper, but it makes a new plan for each length, so for each new token.
UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.no_grad()
def generate(model: GPT, prompt_tokens: Tensor, *, max_new_tokens: int, temperature: float = 1.0,
             top_k: int | None = None, seed: int = 0, stop: int | None = None) -> Tensor:
    """Continue each row of `prompt_tokens` [B, P]; returns [B, P + new], the prompt included.

    temperature: 0 takes the likeliest token; below 1 is safer, above 1 wilder
    top_k:       draw among the k likeliest tokens only
    seed:        each row draws from its own stream, so it does not depend on other rows
    stop:        a token that ends a row. Ended rows repeat it; when all have ended, generation ends
    A sharded model can generate, too. All its ranks must call this with the same `max_new_tokens`, and ranks that share the work on a
    row (tensor, context) with the same prompts. A rank whose rows have ended, or failed, takes part until all are done.
    Text may grow past `seq_len`: the model then continues from the last half of its context.
    raises: DataError for tokens that are no prompt, ConfigError for numbers that are no options, NonFinite for logits that are NaN or
            infinite, as those of weights after a training that diverged
    """
    _check_prompt(model, prompt_tokens)
    _check_options(model, max_new_tokens, temperature, top_k, stop)
    rows = len(prompt_tokens)
    generators = [stream(seed, "generate", row) for row in range(rows)]
    text, unread = prompt_tokens, prompt_tokens[:, -model.config.seq_len:]   # unread: the tokens that are not in the caches
    caches = new_caches(model)
    ended = torch.zeros(rows, dtype=torch.bool, device=prompt_tokens.device)
    failed: NonFinite | None = None
    with evaluating(model), sdpa_kernel(UNPLANNED):
        for _ in range(max_new_tokens):
            is_over = failed is not None or (stop is not None and bool(ended.all()))
            if is_over and not runs_together(model):
                break
            if caches[0].length + unread.shape[1] > model.config.seq_len:
                unread, caches = text[:, -max(1, model.config.seq_len // 2):], new_caches(model)
            logits = model(unread, caches=caches)[:, -1]   # through the model's own call, so that a sharded model gathers its parameters
            if is_over:
                continue
            try:
                unread = choose_token(logits, temperature, top_k, generators)[:, None]
            except NonFinite as error:
                failed = error   # raised below: other ranks' rows may be good, and need this one's forwards
                continue
            if stop is not None:
                unread = unread.masked_fill(ended[:, None], stop)
                ended |= unread[:, 0] == stop
            text = torch.cat((text, unread), dim=1)
    if failed is not None:
        raise failed
    return text


def _check_prompt(model: GPT, prompt_tokens: Tensor) -> None:
    if not hasattr(model, "config"):
        raise ConfigError(f"generate needs a whole GPT, and this is a {type(model).__name__}: where pipeline stages hold it, load "
                          "engine.full_state_dict()[\"model\"] into a GPT")
    expect_type("prompt_tokens", prompt_tokens, Tensor, "a tensor of tokens [rows, tokens], such as torch.tensor([[1, 2]])")
    if prompt_tokens.dtype not in (torch.int64, torch.int32):
        raise DataError(f"the prompt is of {prompt_tokens.dtype}; tokens are of torch.int64 or torch.int32")
    if prompt_tokens.dim() != 2 or prompt_tokens.shape[1] == 0:
        raise DataError(f"the prompt has shape {tuple(prompt_tokens.shape)}; it must be [rows, tokens], with one token "
                        "or more (the end-of-text token, when there is no text to start from)")
    check_tokens(prompt_tokens, model.config.vocab_size)


def _check_options(model: GPT, max_new_tokens: int, temperature: float, top_k: int | None, stop: int | None) -> None:
    expect_type("max_new_tokens", max_new_tokens, Integral, "a whole number")
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}, expected 0 or more")
    if not 0 <= temperature < inf:
        raise ConfigError(f"temperature is {temperature}, expected {'a finite one' if temperature > 0 else '0 or more'}")
    expect_type("top_k", top_k, (Integral, NoneType), "a whole number, or None")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k is {top_k}, expected 1 or more; None, or 0 on the command line, draws among all tokens")
    if stop is not None and not 0 <= stop < model.config.vocab_size:
        raise ConfigError(f"stop is {stop}, which no row ends with: the model's vocabulary is 0 to {model.config.vocab_size - 1}")


def new_caches(model: GPT) -> list[KVCache]:
    """An empty cache per block."""
    return [KVCache(model.config.seq_len) for _ in model.blocks]


def choose_token(logits: Tensor, temperature: float, top_k: int | None, generators: list[torch.Generator]) -> Tensor:
    """The next token of each row [B] from logits [B, V]. Drawn on the CPU, so that it does not depend on the device.

    raises: NonFinite when the largest logit of a row is not finite
    """
    if not logits.amax(dim=1).isfinite().all():   # NaN if there is one
        raise NonFinite("the model's logits are not finite, so it cannot choose a token: its weights are NaN, infinite or too large, as "
                        "after a training that diverged. Train with a smaller learning rate, or load an earlier checkpoint")
    if temperature == 0:
        return logits.argmax(dim=1)
    scores = logits.double().cpu()
    scores = (scores - scores.amax(dim=1, keepdim=True)) / temperature   # all <= 0, so no overflow at a small temperature
    if top_k is not None and top_k < scores.shape[1]:
        kth = scores.topk(top_k, dim=1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    probabilities = scores.softmax(dim=1)
    drawn = [int(torch.multinomial(row, 1, generator=generator)) for row, generator in zip(probabilities, generators, strict=True)]
    return torch.tensor(drawn, dtype=torch.long, device=logits.device)   # of no rows too, where a rank has no prompt
