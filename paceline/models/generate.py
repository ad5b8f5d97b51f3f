"""Sampling from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.models.transformer import Transformer

_GREEDY = 1e-6
"""A temperature below it would take logits out of the range of floats, and draws nothing but the likeliest token."""


def generate(
    model: Transformer,
    prompt_tokens: Sequence[int],
    max_new: int,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Continue a prompt, yielding each token as it is drawn.

    Each token depends on the last `context` tokens before it. While all fit, keys and values are cached;
    beyond that every position shifts with each token, so the window is computed anew.

    Args:
        model: The model, on any device.
        prompt_tokens: At least one token; of a prompt longer than the context the end is used.
        max_new: Number of tokens to yield at most.
        temperature: Logits are divided by it; 0 takes the likeliest token each time.
        top_k: Draw from the k likeliest tokens only; 0 draws from all.
        generator: CPU generator to draw with, torch's default one if None. One seed gives one text.
        stop: Tokens that end the text; the one met is not yielded.

    Raises:
        UserError: An empty prompt, a token outside the vocabulary, or a negative temperature or top_k.
    """
    vocabulary, context = model.config.vocabulary, model.config.context
    if not prompt_tokens:
        raise UserError("The prompt holds no token: give at least one to continue from.")
    outside = [token for token in prompt_tokens if not 0 <= token < vocabulary]
    if outside:
        raise UserError(
            f"The prompt holds token {outside[0]}, but the model knows 0 to {vocabulary - 1}: "
            "use the tokenizer that the model was trained with."
        )
    if not temperature >= 0:
        raise UserError(f"temperature must be 0 (greedy) or above, got {temperature}.")
    if top_k < 0:
        raise UserError(f"top_k must be 0 (no limit) or above, got {top_k}.")
    return _generate(model, list(prompt_tokens)[-context:], max_new, temperature, top_k, generator, stop)


def _generate(
    model: Transformer,
    text: list[int],
    max_new: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator | None,
    stop: Collection[int],
) -> Iterator[int]:
    device, context = model.embedding.weight.device, model.config.context
    cache = model.empty_cache()
    for _ in range(max_new):
        # Entered anew for each token, so that the caller's own code between two runs with gradients on.
        with torch.no_grad():
            if len(text) <= context:
                unseen = torch.tensor([text[cache.length :]], device=device)
                logits = model(unseen, cache=cache)
            else:
                logits = model(torch.tensor([text[-context:]], device=device))
            token = _draw(logits[0, -1], temperature, top_k, generator)
        if token in stop:
            return
        yield token
        text.append(token)


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> int:
    """One token from logits (vocabulary,). Drawn on the CPU, where a seed means the same everywhere."""
    if not torch.isfinite(logits).all():
        raise UserError(
            "The model's predictions are not finite: its weights are of a training that has diverged, or damaged. "
            "Use others."
        )
    if temperature < _GREEDY:
        return int(logits.argmax())
    scaled = logits.cpu().float() / temperature
    if 0 < top_k < len(scaled):
        scaled, candidates = scaled.topk(top_k)
        return int(candidates[torch.multinomial(scaled.softmax(0), 1, generator=generator)])
    return int(torch.multinomial(scaled.softmax(0), 1, generator=generator))
