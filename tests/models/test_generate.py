from __future__ import annotations

from itertools import islice

import pytest
import torch

from paceline.core.errors import UserError
from paceline.models import ModelConfig
from paceline.models.generate import generate
from tests.models.test_transformer import GPT, LLAMA, shapes, spread_model


def recomputed(model: torch.nn.Module, prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """The definition: for each token the whole window anew."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([text[-model.config.context :]]))[0, -1].detach()
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            chances = (logits.float() / temperature).softmax(0)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return text[len(prompt) :]


@shapes
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prompt_length", [1, 4, 10, 17])
def test_cached_text_equals_recomputed_text_within_and_beyond_the_context(
    config: ModelConfig, temperature: float, prompt_length: int
) -> None:
    model = spread_model(config)
    prompt = torch.randint(config.vocabulary, (prompt_length,)).tolist()
    generator = torch.Generator().manual_seed(5)
    text = list(generate(model, prompt, 15, temperature, generator=generator))
    assert text == recomputed(model, prompt, 15, temperature, seed=5)


def test_seed_decides_the_text() -> None:
    model = spread_model(LLAMA)
    texts = [
        list(generate(model, [1], 9, temperature=2.0, generator=torch.Generator().manual_seed(seed)))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_one_candidate_is_greedy_and_k_bounds_the_choice() -> None:
    model = spread_model(GPT)
    greedy = list(generate(model, [3, 4], 8, temperature=0))
    assert list(generate(model, [3, 4], 8, temperature=5.0, top_k=1)) == greedy
    likeliest = set(model(torch.tensor([[3, 4]]))[0, -1].topk(3).indices.tolist())
    drawn = {next(generate(model, [3, 4], 1, temperature=50.0, top_k=3)) for _ in range(60)}
    assert drawn == likeliest


def test_stop_token_ends_the_text_and_is_kept_back() -> None:
    model = spread_model(GPT)
    text = list(generate(model, [3], 9, temperature=0))
    assert list(generate(model, [3], 9, temperature=0, stop={text[4]})) == text[: text.index(text[4])]


def test_consumer_keeps_its_gradient_mode_between_tokens() -> None:
    for _ in islice(generate(spread_model(GPT), [3], 2), 2):
        assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_tokens": []}, "holds no token"),
        ({"prompt_tokens": [2, 31]}, "token 31, but the model knows 0 to 30"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"top_k": -1}, "top_k must be 0"),
    ],
)
def test_bad_request_is_refused_before_the_first_token(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(spread_model(GPT), **{"prompt_tokens": [1], "max_new": 1, **arguments})
