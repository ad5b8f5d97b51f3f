"""Text from a model: a continuation of a prompt, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from paceline.core.errors import UserError
from paceline.data import Tokenizer
from paceline.models.generate import generate
from paceline.models.safetensors_file import load_model
from paceline.models.transformer import Transformer
from paceline.train.run_folder import TOKENIZER, WEIGHTS, find_run

_UNFINISHED = "\ufffd"


def sample_run(run: str, prompt: str, tokens: int, temperature: float, top_k: int, seed: int | None) -> Iterator[str]:
    """Continues a prompt with the weights of a finished, interrupted or running run.

    Args:
        run: The run's folder.
        prompt: What the text begins with; empty for the beginning of a document.
        tokens: Most tokens to add.
        temperature: 0 takes the likeliest token each time, 1 draws as the model predicts.
        top_k: Draw from so many likeliest tokens; 0 for all.
        seed: Makes the text repeatable; None for another one each time.

    Yields:
        The prompt, then pieces of text as they are drawn.

    Raises:
        UserError: There is no such run, it has no weights, or they do not fit or are not finite.
    """
    path = find_run(run, WEIGHTS)
    model = load_model(path / WEIGHTS)
    if len({parameter.dtype for parameter in model.parameters()}) > 1:
        # They compute with each other.
        model.float()
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(
                f"{path / WEIGHTS}: {name} is not finite: the training has diverged, or the file is damaged; use other "
                "weights"
            )
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    yield from _continue(model, path / TOKENIZER, prompt, tokens, temperature, top_k, generator)


def continuation(
    model: Transformer,
    tokenizer: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
) -> str:
    """The prompt and what the model makes of it, as one text; see `sample_run`."""
    return "".join(_continue(model, tokenizer, prompt, tokens, temperature, top_k, generator))


def _continue(
    model: Transformer,
    tokenizer_path: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
) -> Iterator[str]:
    tokenizer = Tokenizer.load(tokenizer_path)
    start = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    yield prompt
    drawn: list[int] = []
    shown = ""
    for token in generate(model, start, tokens, temperature, top_k, generator, stop=(tokenizer.end_of_text,)):
        drawn.append(token)
        text = tokenizer.decode(drawn)
        # A character may be cut between tokens: it is shown when it is whole.
        if not text.endswith(_UNFINISHED):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(drawn)[len(shown) :]
