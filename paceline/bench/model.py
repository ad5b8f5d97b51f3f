"""The reference model's forward and backward pass against a plain hand-written GPT, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.command_line.json_file import JsonFile
from paceline.measuring.alive import AliveBytes
from paceline.measuring.results import Row, make_row, print_rows, write_json
from paceline.models.config import ModelConfig
from paceline.models.presets import preset
from paceline.models.transformer import Transformer


@dataclass(frozen=True)
class ModelShape:
    """One case: a model of GPT-2's kind and the batch it is given, sequences as long as the context."""

    name: str
    config: ModelConfig
    batch: int


SHAPES: tuple[ModelShape, ...] = (
    ModelShape("tiny", preset("tiny"), batch=4),
    ModelShape("6x512, 1x64", ModelConfig(layers=6, width=512, heads=8, context=64), batch=1),
    ModelShape("6x384, 4x256", ModelConfig(layers=6, width=384, heads=6, context=256), batch=4),
)
"""A small model, one with many weights for few tokens, one with many tokens for its weights."""


class PlainGPT(nn.Module):
    """GPT-2 as one writes it by hand from torch's own layers: what the reference model is timed against."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(PlainLayer(config.width, config.heads) for _ in range(config.layers))
        self.last_norm = nn.LayerNorm(config.width)
        self.to_logits = nn.Linear(config.width, config.vocabulary, bias=False)
        self.to_logits.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy of targets (b, s) after tokens (b, s)."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.to_logits(self.last_norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), reduction="sum")


class PlainLayer(nn.Module):
    """Pre-LN attention and GELU feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, width) -> the same shape."""
        b, s, width = x.shape
        q, k, v = (
            part.view(b, s, self.heads, width // self.heads).transpose(1, 2)
            for part in self.attend(self.norm1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).contiguous().view(b, s, width))
        y: Tensor = x + self.feed(self.norm2(x))
        return y


@dataclass(frozen=True)
class ModelBench:
    """Forward and backward of the reference model against a plain hand-written GPT, one process."""

    threads: tuple[int, ...] = (1, 2)
    """Numbers of threads to compute with."""
    rounds: int = 30
    """Passes of each; they take turns."""
    json: JsonFile = ""
    """Where to write machine, versions, command and rows; - prints them, and all else goes to stderr."""


def main(options: ModelBench) -> list[Row]:
    """Runs the benchmark, prints its tables and writes its file."""
    rows = [row for threads in options.threads for row in bench_model(rounds=options.rounds, threads=threads)]
    print_rows(rows, "the plain model")
    if options.json:
        write_json(options.json, rows)
    return rows


def bench_model(shapes: Sequence[ModelShape] = SHAPES, rounds: int = 30, threads: int = 1) -> list[Row]:
    """Time forward and backward of `Transformer` and of `PlainGPT` with the same weights and batch.

    Each round times both, in alternating order, so that other work of the machine slows both alike.

    Args:
        shapes: Cases; their configurations must be of GPT-2's kind, which is all `PlainGPT` can do.
        rounds: Timed passes of each system and case.
        threads: Threads torch computes with; its former number is restored at the end.

    Returns:
        Two rows a case, paceline and plain. `peak_bytes` is the most that one pass's tensors occupied at once,
        gradients included and weights not.

    Raises:
        ValueError: A shape that `PlainGPT` can't take, fewer than 2 rounds, or losses that differ by
            more than 1e-5 of their value.
    """
    if rounds < 2:
        raise ValueError(f"A spread needs at least 2 rounds, got {rounds}.")
    former = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return [row for shape in shapes for row in _bench_shape(shape, rounds, threads)]
    finally:
        torch.set_num_threads(former)


def _bench_shape(shape: ModelShape, rounds: int, threads: int) -> list[Row]:
    c = shape.config
    if c != ModelConfig(c.layers, c.width, c.heads, context=c.context, vocabulary=c.vocabulary):
        raise ValueError(f"{shape.name}: the plain model has GPT-2's form only, got {c}.")
    generator = torch.Generator().manual_seed(0)
    ours, plain = Transformer(c), PlainGPT(c)
    ours.initialise(generator)
    with torch.no_grad():
        for mine, theirs in zip(plain.parameters(), ours.parameters(), strict=True):
            mine.copy_(theirs)
    tokens, targets = torch.randint(c.vocabulary, (2, shape.batch, c.context), generator=generator)
    systems: dict[str, nn.Module] = {"paceline": ours, "plain": plain}

    losses = {name: _pass(model, tokens, targets)[1] for name, model in systems.items()}
    if not abs(losses["paceline"] - losses["plain"]) <= 1e-5 * losses["plain"]:
        raise ValueError(f"{shape.name}: the two models do not compute the same loss: {losses}.")
    peaks = {name: _peak_bytes(model, tokens, targets) for name, model in systems.items()}
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds):
        order = list(systems) if number % 2 else list(reversed(systems))
        for name in order:
            times[name].append(_pass(systems[name], tokens, targets)[0])

    setting = f"{threads} thread{'s' if threads > 1 else ''}"
    return [
        make_row(shape.name, name, setting, 1, seconds, times["plain"], peaks[name], 0)
        for name, seconds in times.items()
    ]


def _pass(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    """Seconds of one forward and backward pass with gradients made anew, and its loss."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    loss = model(tokens, targets)
    loss.backward()
    return time.perf_counter() - start, loss.item()


def _peak_bytes(model: nn.Module, tokens: Tensor, targets: Tensor) -> int:
    """Most bytes of tensors alive at once that one pass made, gradients included."""
    model.zero_grad(set_to_none=True)
    with AliveBytes() as alive:
        _pass(model, tokens, targets)
    peak: int = alive.peak
    return peak
