from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.data import TokenFile
from paceline.train.validate import validate

CONTEXT = 8


class Bigram(nn.Module):
    """Knows the probability of each token given the one before; counts what it is shown."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits
        self.seen = 0
        self.trained_meanwhile = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.seen += int((targets != -100).sum())
        self.trained_meanwhile |= self.training
        return nn.functional.cross_entropy(
            self.logits[tokens].flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    pl.init(device="cpu")
    yield
    pl.shutdown()


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 16, 101).astype(np.uint16)


def text(tokens: np.ndarray) -> TokenFile:
    return TokenFile(Path("held-out"), 250, tokens)


def nats(model: Bigram, tokens: np.ndarray) -> float:
    ids = torch.from_numpy(tokens.astype(np.int64))
    return float(nn.functional.cross_entropy(model.logits[ids[:-1]], ids[1:], reduction="sum"))


@pytest.mark.parametrize("micro_batch", [1, 3, 100])
def test_bits_per_byte_are_all_bits_over_all_bytes(tokens: np.ndarray, micro_batch: int) -> None:
    model = Bigram(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))
    result = validate(model, text(tokens), context=CONTEXT, micro_batch=micro_batch)
    assert result is not None
    assert model.seen == result.tokens == 100
    assert result.loss == pytest.approx(nats(model, tokens) / 100, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(nats(model, tokens) / math.log(2) / 250, rel=1e-5)
    assert result.share == 1
    assert model.training and not model.trained_meanwhile


def test_a_part_is_spread_over_the_text_and_says_how_much_it_is(tokens: np.ndarray) -> None:
    model = Bigram(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))
    heard = []
    result = validate(
        model, text(tokens), context=CONTEXT, micro_batch=4, samples=5, progress=lambda *done: heard.append(done)
    )
    assert result is not None
    assert result.tokens == 40
    assert result.share == pytest.approx(0.4)
    # Of 13 samples, the last of them short.
    parts = [tokens[start * CONTEXT : (start + 1) * CONTEXT + 1] for start in (0, 2, 5, 7, 10)]
    assert result.loss == pytest.approx(sum(nats(model, part) for part in parts) / 40, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(result.loss * 40 / math.log(2) / 100, rel=1e-5)
    assert heard == [(0, 2), (1, 2)]


def test_more_samples_than_there_are_is_the_whole_text(tokens: np.ndarray) -> None:
    result = validate(Bigram(torch.zeros(16, 16)), text(tokens), context=CONTEXT, micro_batch=4, samples=999)
    assert result is not None and result.share == 1
    assert result.loss == pytest.approx(math.log(16))


def test_a_stop_gives_it_up(tokens: np.ndarray) -> None:
    model = Bigram(torch.zeros(16, 16))
    assert validate(model, text(tokens), context=CONTEXT, micro_batch=1, stopped=lambda: model.seen > 20) is None
    assert model.seen < 40 and model.training
