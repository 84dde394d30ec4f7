"""Text written by a trained model, for `samples.txt` and `rankloom generate`."""

from collections.abc import Sequence

import torch

from rankloom.data.arrays import Tokens
from rankloom.data.tokenizer import Tokenizer
from rankloom.models.generate import generate
from rankloom.models.gpt import GPT

TEMPERATURE = 0.8
TOP_K = 50


def starts(tokens: Tokens, number: int, length: int) -> list[list[int]]:
    """`number` pieces of `length` tokens, evenly spread over `tokens`; fewer tokens give shorter pieces."""
    room = max(0, len(tokens) - length)
    places = [room * i // max(1, number) for i in range(number)]
    return [[int(t) for t in tokens[at : at + length]] for at in places]


def continue_texts(model: GPT, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], *, max_tokens: int,
                   temperature: float = TEMPERATURE, top_k: int | None = TOP_K, seed: int = 0) -> list[str]:
    """Each prompt with the model's continuation, until the model ends the text or has written `max_tokens`.

    An empty prompt means the beginning of a text. Prompt number i draws from the stream of seed + i.
    raises: DataError when a prompt has a token outside the model's vocabulary
    """
    device = model.output_weight.device
    texts = []
    for number, prompt in enumerate(prompts):
        row = torch.tensor([list(prompt) or [tokenizer.eot]], device=device)
        written = generate(model, row, max_new_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=seed + number,
                           stop=tokenizer.eot)
        texts.append(tokenizer.decode(written[0].tolist()))
    return texts
