from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.models import ModelConfig
from paceline.models.transformer import Transformer, rotate, rotation_at
from tests.models.reference import reference_logits, reference_loss

GPT = ModelConfig(layers=2, width=24, heads=4, context=10, vocabulary=31)
LLAMA = ModelConfig(
    layers=2,
    width=24,
    heads=4,
    ff=36,
    context=10,
    vocabulary=31,
    norm="rmsnorm",
    position="rotary",
    activation="swiglu",
    bias=False,
    tied=False,
)
SHAPES = {
    "gpt": GPT,
    "gpt without biases, untied": dataclasses.replace(GPT, bias=False, tied=False),
    "gpt with grouped queries": dataclasses.replace(GPT, kv_heads=1),
    "llama": LLAMA,
    "llama with grouped queries": dataclasses.replace(LLAMA, kv_heads=2),
    "llama tied, with biases": dataclasses.replace(LLAMA, tied=True, bias=True),
}
shapes = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())


def spread_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """A float64 model whose every parameter is random and large enough to matter."""
    torch.manual_seed(seed)
    model = Transformer(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def batch(config: ModelConfig, sequences: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.randint(config.vocabulary, (2, sequences, config.context))
    targets[0, 2:5] = -100
    targets[-1, -1] = -100
    return tokens, targets


@shapes
def test_logits_loss_and_every_gradient_equal_the_definition(config: ModelConfig) -> None:
    model = spread_model(config)
    tokens, targets = batch(config)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.testing.assert_close(model(tokens), reference_logits(weights, config, tokens), rtol=1e-10, atol=1e-10)

    loss, expected = model(tokens, targets), reference_loss(weights, config, tokens, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    (loss * 0.25).backward()
    (expected * 0.25).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9, msg=name)


@shapes
def test_later_tokens_do_not_reach_earlier_logits(config: ModelConfig) -> None:
    model = spread_model(config)
    tokens, _ = batch(config)
    for place in range(1, config.context):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % config.vocabulary
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.allclose(before[:, place], after[:, place])


@shapes
@given(cut=st.integers(1, 3), seed=st.integers(0, 2**20))
@settings(max_examples=5, deadline=None)
def test_loss_and_gradient_add_up_over_micro_batches(config: ModelConfig, cut: int, seed: int) -> None:
    model = spread_model(config, seed)
    tokens, targets = batch(config, sequences=4)
    whole = model(tokens, targets)
    whole.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parts = [model(tokens[part], targets[part]) for part in (slice(0, cut), slice(cut, None))]
    for part in parts:
        part.backward()
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def test_ignored_targets_give_no_loss_and_no_gradient() -> None:
    model = spread_model(GPT)
    tokens, targets = batch(GPT)
    loss = model(tokens, torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad.count_nonzero() == 0 for p in model.parameters())


def test_rotary_scores_depend_on_distance_alone() -> None:
    config = dataclasses.replace(LLAMA, context=1000)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, config.head_width).double()

    def score(query_at: int, key_at: int) -> float:
        turned_q = rotate(q, rotation_at(query_at, 1, config, q))
        turned_k = rotate(k, rotation_at(key_at, 1, config, k))
        return float((turned_q * turned_k).sum())

    for distance in (0, 1, 7):
        assert score(900 + distance, 900) == pytest.approx(score(distance, 0), rel=1e-10)
    assert score(1, 0) != pytest.approx(score(7, 0), rel=1e-3)


def test_half_precision_model_sums_its_loss_in_float32() -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(GPT, context=256)
    model = Transformer(config).bfloat16()
    tokens, targets = batch(config, sequences=8)
    loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    logits = model(tokens).double()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_autocast_gives_the_gradients_of_the_float32_model_to_its_precision() -> None:
    torch.manual_seed(0)
    model = Transformer(LLAMA)
    tokens, targets = batch(LLAMA)
    model(tokens, targets).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - gradient).norm() < 0.03 * gradient.norm()


def test_weights_follow_the_seed_and_the_published_scales() -> None:
    config = ModelConfig(layers=8, width=256, heads=4)
    torch.manual_seed(7)
    first = Transformer(config).state_dict()
    torch.manual_seed(7)
    model = Transformer(config)
    assert all(torch.equal(first[name], value) for name, value in model.state_dict().items())
    assert model.blocks[0].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.blocks[0].attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert model.blocks[7].feed_forward.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert model.blocks[3].feed_forward.up.bias.count_nonzero() == 0
    assert (model.norm.weight == 1).all()


@shapes
def test_model_built_on_meta_materialises_to_the_same_weights(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Transformer(config)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.initialise(torch.Generator().manual_seed(3))
    direct = Transformer(config)
    direct.initialise(torch.Generator().manual_seed(3))
    for (name, ours), (other, theirs) in zip(model.state_dict().items(), direct.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs)
    assert (model.head.weight is model.embedding.weight) == config.tied


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="11 tokens exceed the model's context of 10"):
        Transformer(GPT)(torch.zeros(1, 11, dtype=torch.int64))
