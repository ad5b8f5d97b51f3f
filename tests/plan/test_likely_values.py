"""Models whose shapes depend on values: with even choices, full masks and sequences they compute what is traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode

from paceline.plan.trace import trace
from tests.quick import full

WIDTH, EXPERTS, TOKENS, SAMPLES = 8, 4, 16, 3

Spread = Callable[[nn.ModuleList, Tensor, Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """Each token goes to the two experts that a gate chooses; all rows go to some, whatever the choice."""

    def __init__(self, spread: Spread, chosen: int = 2) -> None:
        super().__init__()
        self.gate, self.spread, self.chosen = nn.Linear(WIDTH, EXPERTS), spread, chosen
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, choices = self.gate(rows).softmax(-1).topk(self.chosen, -1)
        return self.spread(self.experts, rows, weights, choices).view(x.shape)


def by_where(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        rows, slots = torch.where(choices == index)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, slots, None])
    return out


def by_one_hot(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    out, chosen = torch.zeros_like(x), F.one_hot(choices, len(experts)).permute(2, 1, 0)
    hit = (chosen.sum((-1, -2)) > 0).nonzero()
    for index in range(len(hit)):
        slots, rows = chosen[index].nonzero(as_tuple=True)
        out = out.index_add(0, rows, expert_of(experts, index)(x[rows]) * weights[rows, slots, None])
    return out


def by_masks(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        mask = choices[:, 0] == index
        if mask.any() and not torch.isinf(x).any():
            out[mask] = expert(x[mask]) * weights[mask]
    return out


def by_sizes(sizes_of: Callable[[Tensor, int], Tensor]) -> Spread:
    def spread(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
        flat = choices.flatten()
        order, sizes = flat.argsort(), sizes_of(flat, len(experts)).tolist()
        parts = x[order // choices.shape[1]].split(sizes)
        results = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
        back = torch.zeros_like(results).index_copy(0, order, results)
        return (back.view(*choices.shape, WIDTH) * weights[..., None]).sum(1)

    return spread


by_bins = by_sizes(lambda flat, several: torch.bincount(flat, minlength=several))
by_a_histogram = by_sizes(lambda flat, several: torch.histc(flat.float(), several, 0, several - 1).long())


def by_sums_of_sizes(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    """As DeepSeek has it."""
    flat = choices.flatten()
    order, ends, begin, results = flat.argsort(), torch.bincount(flat, minlength=len(experts)).cumsum(0), 0, []
    for expert, end in zip(experts, ends.tolist(), strict=True):
        if begin < end:
            results.append(expert(x[order // choices.shape[1]][begin:end]))
        begin = end
    back = torch.zeros(len(flat), WIDTH, dtype=x.dtype).index_copy(0, order, torch.cat(results))
    return (back.view(*choices.shape, WIDTH) * weights[..., None]).sum(1)


def by_a_map_of_weights(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    spread, out = torch.zeros(len(x), len(experts), dtype=x.dtype).scatter(1, choices, weights), torch.zeros_like(x)
    for index, expert in enumerate(experts):
        rows = torch.where(spread[:, index] > 0)[0]
        out = out.index_add(0, rows, expert(x[rows]) * spread[rows, index, None])
    return out


def by_those_that_are_hit(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    """As transformers has it, with one expert more that stands for none."""
    out, chosen = torch.zeros_like(x), F.one_hot(choices, len(experts) + 1).permute(2, 1, 0)
    for hit in torch.greater(chosen.sum((-1, -2)), 0).nonzero():
        if hit[0] == len(experts):
            continue
        slots, rows = torch.where(chosen[hit[0]])
        out.index_add_(0, rows, experts[hit[0]](x[rows]) * weights[rows, slots, None])
    return out


def by_each_that_occurs(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index in torch.unique(choices).tolist():
        rows, slots = torch.where(choices == index)
        out.index_add_(0, rows, experts[index](x[rows]) * weights[rows, slots, None])
    return out


def by_what_fits(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    """As Switch has it."""
    chosen, out = F.one_hot(choices[:, 0], len(experts)), torch.zeros_like(x)
    mask = (chosen * (chosen.cumsum(0) <= 1000)).bool()
    for index in mask.sum(0).nonzero(as_tuple=True)[0].tolist():
        out[mask[:, index]] = experts[index](x[mask[:, index]])
    return out * weights


def by_a_scattered_map(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    chosen = torch.zeros(x.shape[0], len(experts)).scatter_(1, choices, 1.0).bool()
    out = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        rows = chosen[:, index].nonzero().squeeze(1)
        out[rows] += expert(x[rows])
    return out * weights.sum(1, keepdim=True)


def with_a_capacity(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    out, chosen = torch.zeros_like(x), F.one_hot(choices[:, 0], len(experts))
    fits = ((chosen.cumsum(0) - 1) * chosen).sum(-1) < 1000
    for index, expert in enumerate(experts):
        mask = (choices[:, 0] == index) & fits
        out[mask] = expert(x[mask])
    return out * weights


def by_a_sort(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    best, out = (
        torch.sort(weights.new_zeros(len(x), len(experts)), dim=-1, descending=True)[1][:, :2],
        torch.zeros_like(x),
    )
    for index, expert in enumerate(experts):
        rows, slots = (best == index).nonzero(as_tuple=True)
        out = out.index_add(0, rows, expert(x[rows]) * weights[rows, slots, None])
    return out


def to_all_others(experts: nn.ModuleList, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
    out, first = torch.zeros_like(x), choices[:, 0] == 0
    for expert, mask in ((experts[0], first), (experts[1], ~first), (experts[2], choices[:, 0] != 0)):
        out[mask] = expert(x[mask])
    return out * weights


class Guarded(nn.Module):
    """Looks whether numbers are finite, and writes one down."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if torch.isnan(y).any() or not torch.isfinite(y).all():
            raise RuntimeError("not finite")
        self.size = y.abs().mean().item()
        return self.head(y)


def expert_of(experts: nn.ModuleList, index: int) -> nn.Module:
    return experts[index]


class Selects(nn.Module):
    """A head of the rows alone that a mask keeps, which is all."""

    def __init__(self, masked: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.masked = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), masked

    def forward(self, x: Tensor) -> Tensor:
        kept = x[..., 0] > -100
        return self.head(self.masked(self.body(x), kept))


class Packed(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        result, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(result)


class Transcribes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor, labels: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
        scores = self.head(self.body(x)).float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, labels, frames, lengths)


X = torch.randn(SAMPLES, TOKENS, WIDTH)
FULL, LABELS = torch.full((SAMPLES,), TOKENS), torch.ones(SAMPLES, 3, dtype=torch.int64)

MODELS: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "where": (Experts(by_where), (X,)),
    "one-hot": (Experts(by_one_hot), (X,)),
    "masks": (Experts(by_masks, chosen=1), (X,)),
    "sizes": (Experts(by_bins), (X,)),
    "a histogram": (Experts(by_a_histogram), (X,)),
    "sums of sizes": (Experts(by_sums_of_sizes), (X,)),
    "a map of weights": (Experts(by_a_map_of_weights), (X,)),
    "those that are hit": (Experts(by_those_that_are_hit), (X,)),
    "each that occurs": (Experts(by_each_that_occurs), (X,)),
    "what fits": (Experts(by_what_fits, chosen=1), (X,)),
    "a scattered map": (Experts(by_a_scattered_map), (X,)),
    "a capacity": (Experts(with_a_capacity, chosen=1), (X,)),
    "a sort": (Experts(by_a_sort), (X,)),
    "guards and a log": (Guarded(), (X,)),
    "rows of a mask": (Selects(lambda x, kept: x[kept]), (X,)),
    "masked_select": (Selects(lambda x, kept: x.masked_select(kept[..., None]).view(-1, WIDTH)), (X,)),
    "packed LSTM": (Packed(nn.LSTM(WIDTH, WIDTH, batch_first=True)), (X, FULL)),
    "packed GRU both ways": (Packed(nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)), (X, FULL)),
    "CTC": (Transcribes(), (X, LABELS, FULL, torch.full((SAMPLES,), 3))),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["float32", full("bfloat16")])
def test_as_many_operations_as_torch_counts(name: str, precision: str) -> None:
    model, example = MODELS[name]
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        model(*example).sum().backward()
    work = trace(model, SAMPLES, inputs=example, precision=precision)
    (told,) = work.warnings
    assert "depend on values: choices, as of experts, are taken to be even" in told
    # Where a GRU's or an LSTM's last states are not used, torch's own counter has one product less.
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=0.02 if "packed" in name else 1e-12)


def test_rows_that_experts_cannot_share_equally_are_all_computed() -> None:
    """Of 5 tokens that go to two of four experts each, three go to some and two to others."""
    example = torch.randn(1, 5, WIDTH)
    work = trace(Experts(by_bins), 1, inputs=example)
    products = [each for unit in work.units for each in unit.forward if each.shape[3] == 3 * WIDTH]
    assert sorted(each.shape[1] for each in products for _ in range(each.count)) == [2, 2, 3, 3]


def test_what_is_not_chosen_goes_elsewhere() -> None:
    """A quarter of the rows go to the first expert, and all others to the second and once more to the third."""
    work = trace(Experts(to_all_others, chosen=1), SAMPLES, inputs=X)
    products = [each for unit in work.units for each in unit.forward if each.shape[3] == 3 * WIDTH]
    rows = SAMPLES * TOKENS
    assert [each.shape[1] for each in products] == [rows // EXPERTS, rows - rows // EXPERTS, rows - rows // EXPERTS]


def test_of_real_values_nothing_is_guessed() -> None:
    from paceline.plan.observed_pass import ObservedPass

    with ObservedPass([]) as seen:
        rows = torch.tensor([True, False, True]).nonzero()
    assert rows.tolist() == [[0], [2]] and not seen.guessed


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_of_transformers_compute_what_is_traced(experts: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    config._experts_implementation, config.use_cache = experts, False
    model, tokens = transformers.MixtralForCausalLM(config), torch.randint(64, (SAMPLES, TOKENS))
    work = trace(model, SAMPLES, inputs={"input_ids": tokens, "labels": tokens}, device="cpu")
    config._experts_implementation = "eager"
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens).loss.backward()
    # Attention that is fused computes scores again in backward.
    assert work.needed_flops == pytest.approx(counter.get_total_flops(), rel=1e-12)
