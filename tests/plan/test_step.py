from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.core.build_layout import build_layout
from paceline.core.errors import UserError
from paceline.core.layout import ROOT
from paceline.core.schedule import Schedule
from paceline.core.simulate import simulate
from paceline.core.strategy import Strategy
from paceline.models.config import ModelConfig
from paceline.models.flops import parameter_count
from paceline.models.presets import PRESETS
from paceline.plan import profiles
from paceline.plan.costs import step_costs
from paceline.plan.models import meta_model
from paceline.plan.run import Run
from paceline.plan.stages import shapes
from paceline.plan.step import step_time
from paceline.plan.transformer_work import Software, transformer_work

A100, H100 = profiles.hardware("a100"), profiles.hardware("h100")
GPT = ModelConfig(layers=24, width=2048, heads=16, context=2048, vocabulary=50304)


@pytest.mark.parametrize("devices", [8, 64])
@pytest.mark.parametrize("zero", [2, 3])
def test_the_closed_form_agrees_with_the_simulated_schedule(devices: int, zero: int) -> None:
    config = replace(PRESETS["llama-8b"], context=4096)
    found = shapes(meta_model("llama-8b"))
    strategy = Strategy(zero=zero, precision="bfloat16", recompute="unit")  # type: ignore[arg-type]
    layout = build_layout(found.parameters, (ROOT, *found.units), strategy, devices)
    schedule = Schedule(layout, strategy, devices, rank=0, order=found.units)
    hardware = replace(A100, kernels=replace(A100.kernels, contention=0.0, straggling=0.0))
    costs = step_costs(transformer_work(config, 2), hardware, schedule)
    simulated = max(event.end for event in simulate(schedule, costs) if event.stream == "compute")
    closed = step_time(Run(config, devices, 2, zero=zero, recompute="unit"), hardware).total
    assert closed == pytest.approx(simulated, rel=0.05)


def test_parts_add_up_and_stages_wait_as_the_formula_says() -> None:
    run = Run(replace(GPT, vocabulary=512), 64, 1, 16, tensor=4, pipeline=4, recompute="unit", overlap=False)
    step = step_time(run, A100)
    parts = (step.compute, step.gather, step.reduce, step.tensor, step.send, step.bubble, step.optimizer)
    assert all(part >= 0 for part in parts) and step.tensor > 0 and step.send > 0
    assert step.total == pytest.approx(sum(parts) + step.straggling)
    # (p - 1) / m of the rest (Narayanan et al. 2021), but for embedding and head, which only two stages have.
    assert step.bubble == pytest.approx((step.compute + step.tensor + step.send) * 3 / 16, rel=0.05)
    interleaved = step_time(replace(run, chunks=2), A100)
    assert interleaved.bubble < step.bubble


def test_recomputing_costs_a_third_of_the_blocks() -> None:
    plain, again, part = (
        step_time(Run(GPT, 8, 4, zero=3, recompute=recompute, recompute_share=share), A100)
        for recompute, share in (("none", 1.0), ("unit", 1.0), ("unit", 0.5))
    )
    assert 1.2 < again.compute / plain.compute < 1.34
    assert part.compute == pytest.approx((plain.compute + again.compute) / 2)


def test_more_hosts_wait_longer_and_slower_links_too() -> None:
    times = [step_time(Run(GPT, devices, 1, zero=3), A100).total for devices in (8, 16, 64, 512, 4096)]
    assert all(fewer < more for fewer, more in pairwise(times))
    slow = replace(A100, between=replace(A100.between, bandwidth=1e9))
    assert step_time(Run(GPT, 64, 1, zero=3), slow).total > 2 * times[2]


def test_what_hides_behind_computing_costs_no_more_over_slow_wires() -> None:
    run = Run(replace(GPT, context=32768), 16, 1, zero=3)
    fast, slow = (
        step_time(run, replace(A100, between=replace(A100.between, bandwidth=bandwidth))) for bandwidth in (1e11, 5e9)
    )
    # Two gathers in 16 bits and a reduction in 32, of which a host takes in half; all but the ends hides.
    moved = parameter_count(run.config) * (2 + 2 + 4) / 2 / (8 * 5e9)
    assert 0 < slow.total - fast.total < 0.25 * moved < 0.1 * fast.total


def test_what_hides_is_in_computing_s_way_by_its_bytes_alone_where_each_step_moves_them_once() -> None:
    run = Run(replace(GPT, context=32768), 128, 1, 4, tensor=8, zero=1)
    fast, slow = (
        step_time(run, replace(A100, between=replace(A100.between, bandwidth=bandwidth))) for bandwidth in (1e11, 2e10)
    )
    # One rank a host: the gradients, in 32 bits, and the parameters, in 16, of which the ends alone wait for wires.
    moved = parameter_count(run.config) / 8 * (4 + 2) * (1 / 2e10 - 1 / 1e11)
    assert 0 < slow.total - fast.total < 0.25 * moved


def test_ranks_that_share_a_sequence_share_states_and_reduce_its_gradients() -> None:
    run = Run(replace(GPT, position="rotary"), 16, 1, zero=3)
    longer = replace(run, config=replace(run.config, context=8 * 2048), context_ranks=8)
    assert (longer.data, longer.copies, longer.shards) == (2, 16, 16)
    assert step_time(longer, A100).optimizer == step_time(run, A100).optimizer
    alone = step_time(replace(longer, devices=8), A100)
    assert alone.reduce > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"tensor": 3}, "divides"), ({"pipeline": 32}, "at least a layer"), ({"tensor": 32}, "heads that tp")],
)
def test_what_cannot_be_cut_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(Run(GPT, 64, 1), **change)


def test_what_nanotron_does_in_its_own_way_is_no_faster() -> None:
    run = Run(GPT, 64, 1, 4, zero=1)
    plain = step_time(run, A100)
    own = {"reduces_whole": True, "bucket": 1_000_000, "copied_parts": 6, "added": 10}
    for name, value in own.items():
        changed = step_time(replace(run, **{name: value}), A100)  # type: ignore[arg-type]
        assert changed.total > plain.total, name
    # A launch for each of 6 tensors' parts on each rank, by hand.
    alone, copied = (step_time(replace(run, copied_parts=parts), A100).gather for parts in (1, 6))
    launches = run.config.layers / run.pipeline * run.shards * A100.kernels.launch
    assert alone > plain.gather and copied - alone == pytest.approx(5 * launches)
    assert step_time(replace(run, bucket=1_000_000), A100).reduce > plain.reduce


def test_tensor_ranks_gather_what_is_cast_to_8_bits_in_8_bits() -> None:
    run = Run(GPT, 8, 4, tensor=8, sequence_parallel=True)
    at_once = replace(H100, kernels=replace(H100.kernels, launch=0.0), within=replace(H100.within, latency=0.0))

    def exchanged(dtype: str, row_scales: bool = False) -> float:
        return step_time(replace(run, dtype=dtype, software=Software(row_scales=row_scales)), at_once).tensor

    assert exchanged("float8") == pytest.approx(exchanged("bfloat16") * 3 / 4)
    assert exchanged("float8", row_scales=True) == pytest.approx(exchanged("bfloat16"))


def test_sums_of_separate_products_have_no_matmul_to_hide_behind() -> None:
    run = Run(GPT, 8, 4, tensor=8, sequence_parallel=True)

    def exchanged(**changes: object) -> float:
        return step_time(replace(run, **changes), A100).tensor  # type: ignore[arg-type]

    plain, fused = exchanged(), exchanged(overlap_tensor=True)
    apart = exchanged(overlap_tensor=True, software=Software(separate=True))
    assert exchanged(software=Software(separate=True)) == pytest.approx(plain)
    # All but the first of eight pieces; of backward, which is half, only what is gathered.
    assert fused == pytest.approx(plain / 8)
    assert apart == pytest.approx(plain / 2 / 8 + plain / 2 * (1 / 2 + 1 / 2 / 8))


def test_tensor_ranks_that_send_parts_send_each_byte_once_between_hosts() -> None:
    run = Run(GPT, 64, 1, 8, tensor=8, pipeline=8, dtype="float16")
    whole, parts = (step_time(replace(run, sends_parts=sends), A100) for sends in (False, True))
    size = 2048 * 2048 * 2  # tokens x width x bytes
    forward_and_back, micro_batches = 2, 8
    wire = 8e-6 + size / A100.between.bandwidth
    part = 8e-6 + size / 8 / A100.between.bandwidth
    gathered = 7 * 2e-6 + size * 7 / 8 / A100.within.bandwidth
    assert whole.send == pytest.approx(forward_and_back * micro_batches * wire)
    assert parts.send == pytest.approx(forward_and_back * micro_batches * (part + gathered))
    assert parts.total < whole.total


def test_what_stages_send_while_all_compute_is_waited_for_only_as_a_step_fills_up() -> None:
    run = Run(replace(GPT, vocabulary=512), 64, 1, 16, tensor=4, pipeline=4, chunks=2, overlap=False)
    waits, beside = step_time(run, A100), step_time(replace(run, overlap_sent=True), A100)
    assert beside.send == 0 < waits.send
    assert beside.bubble == pytest.approx(waits.bubble)
    hosts = 1 + A100.kernels.straggling * 3
    assert waits.total - beside.total == pytest.approx(waits.send * hosts)
