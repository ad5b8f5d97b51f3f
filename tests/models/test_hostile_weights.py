"""Files of weights that no training wrote: each ends in one line, and none takes time or memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.errors import UserError
from paceline.models import ModelConfig
from paceline.models.generate import generate
from paceline.models.safetensors_file import _checksum, load_model
from paceline.models.transformer import Transformer
from paceline.train.sample import sample_run

CONFIG = ModelConfig(layers=1, width=8, heads=2, context=4, vocabulary=11)
TIED = {"head.weight": "embedding.weight"}


def weights() -> dict[str, Tensor]:
    state = Transformer(CONFIG).state_dict()
    return {name: tensor for name, tensor in state.items() if name not in TIED}


def written(path: Path, config: Any, tied: Any = TIED, state: dict[str, Tensor] | None = None) -> Path:
    """A file as a training writes it, but for what it says."""
    state = weights() if state is None else state
    metadata = {
        "paceline.config": config if isinstance(config, str) else json.dumps(config),
        "paceline.tied": tied if isinstance(tied, str) else json.dumps(tied),
        "paceline.crc32": str(_checksum(state)),
    }
    save_file(state, path, metadata)
    return path


def config(**changes: Any) -> dict[str, Any]:
    return dataclasses.asdict(CONFIG) | changes


@pytest.mark.parametrize(
    ("said", "tied", "words"),
    [
        (config(layers=10**8), TIED, "100,000,000 layers, but"),
        (config(layers=2.5), TIED, "Expected `int`, got `float`"),
        (config(layers="1"), TIED, "Expected `int`, got `str`"),
        (config(width=10**8 - 1, heads=7), TIED, "width must be a multiple of heads"),
        (config(vocabulary=10**12), TIED, "vocabulary must be at most 100,000,000"),
        (config(vocabulary=10**8), TIED, "do not fit"),
        (config(**{"\x1b[31m": 1}), TIED, "is unknown"),
        ([], TIED, "Expected `object`, got `array`"),
        ("[" * 100_000, TIED, "recursion"),
        ('{"layers": ' + "9" * 5000 + "}", TIED, "is damaged"),
        (config(), [1], "Expected `object`, got `array`"),
        (config(), {"head.weight": "blocks.0.norm.weight"}, "holds tensors but not"),
        (config(), {"head.weight": "positions.weight"}, "said to be one tensor, but are two"),
        (config(), {"head.weight": ["embedding.weight"]}, "is damaged"),
        (config(tied=False), {}, "do not fit"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, said: Any, tied: Any, words: str) -> None:
    path = written(tmp_path / "model.safetensors", said, tied)
    with pytest.raises(UserError, match=words) as caught:
        load_model(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600 + len(str(path))


def test_whole_numbers_for_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    state = {name: tensor.to(torch.int8) for name, tensor in weights().items()}
    with pytest.raises(UserError, match="do not fit") as caught:
        load_model(written(tmp_path / "model.safetensors", config(), state=state))
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_finite_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    state = weights()
    state["embedding.weight"][3, 3] = torch.nan
    written(tmp_path / "model.safetensors", config(), state=state)
    with pytest.raises(UserError, match=r"embedding\.weight is not finite"):
        next(sample_run(str(tmp_path), "a", 1, 1.0, 0, 0))


def test_predictions_that_are_not_finite_are_a_users_mistake() -> None:
    model = Transformer(CONFIG)
    with torch.no_grad():
        model.embedding.weight.mul_(1e38)
    with pytest.raises(UserError, match="predictions are not finite"):
        list(generate(model, [1], 2))


@example({"width": 2**63})
@given(
    st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(ModelConfig)]),
        st.one_of(st.integers(-5, 50), st.integers(), st.floats(), st.text(max_size=5), st.none(), st.booleans()),
        max_size=3,
    )
)
def test_anything_is_a_model_or_a_users_mistake(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    path = written(tmp_path_factory.getbasetemp() / "drawn.safetensors", config(**changes))
    try:
        load_model(path)
    except UserError as error:
        assert "\n" not in str(error)
