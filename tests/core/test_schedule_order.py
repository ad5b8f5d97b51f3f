"""What holds of every schedule: drawn ones, whatever their ops take."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.build_layout import build_layout
from paceline.core.layout import ROOT
from paceline.core.memory import memory
from paceline.core.ops import COMPUTE, PREVIOUS, READ, STATISTICS, STREAMS, WRITTEN, Key, Op
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy
from tests import drawn
from tests.drawn import micro_batch_counts, schedules
from tests.quick import examples


@given(schedules(), micro_batch_counts)
def test_an_op_occurs_once_and_after_all_that_it_comes_after(plan: Schedule, micro_batches: int) -> None:
    ops = plan.step(micro_batches)
    all_keys = {op.key for op in ops}
    seen: set[Key] = set()
    for op in ops:
        assert op.key not in seen
        assert len(op.after) == len(set(op.after))
        for key in op.after:
            if key.micro_batch == PREVIOUS:
                assert key._replace(micro_batch=micro_batches - 1) in all_keys
            else:
                assert key in seen
        seen.add(op.key)
        assert op.stream in STREAMS
        assert (op.stream == "compute") == (op.kind in COMPUTE)
        assert op.bytes == op.sent == op.received == 0 or op.kind not in COMPUTE


@given(schedules(), micro_batch_counts)
def test_units_run_forward_in_their_order_and_backward_in_reverse(plan: Schedule, micro_batches: int) -> None:
    ops = plan.step(micro_batches)
    ran = [(op.kind, op.target, op.micro_batch) for op in ops if op.kind in ("forward", "backward")]
    assert ran == [
        (kind, unit, index)
        for index in range(micro_batches)
        for kind, units in (("forward", plan.order or (ROOT,)), ("backward", plan.order[::-1] or (ROOT,)))
        for unit in units
    ]
    assert plan.step(micro_batches) == ops, "asked again, the same"


@given(schedules(), micro_batch_counts)
def test_each_unit_is_copied_in_once_and_not_before_its_gradients_are_final(plan: Schedule, micro_batches: int) -> None:
    held = {unit for bucket in plan.layout.buckets if bucket.trainable for unit in bucket.units}
    for index in range(micro_batches):
        ops = plan.backward(index, synchronise=index == micro_batches - 1)
        copied = [op.target for op in ops if op.kind == "copy_in"]
        copies = plan.world_size > 1 or plan.strategy.low
        assert Counter(copied) == Counter(held if copies else ())
        position = {(op.kind, op.target): place for place, op in enumerate(ops)}
        last = max((place for (kind, _), place in position.items() if kind == "backward"), default=-1)
        for unit in copied:
            early = unit in plan.order and unit not in plan.deferred and plan.strategy.synchronize == "overlap"
            assert position["copy_in", unit] > (position["backward", unit] if early else last)


@given(schedules(), micro_batch_counts)
def test_buckets_are_reduced_once_where_the_policy_says_and_after_all_their_units(plan, micro_batches: int) -> None:
    for index in range(micro_batches):
        last = index == micro_batches - 1
        ops = plan.backward(index, synchronise=last)
        reduces = [op for op in ops if op.stream == "reduce"]
        reduces_now = plan.world_size > 1 and (last or plan.strategy.reduces_every_micro_batch)
        trainable = [bucket for bucket in plan.layout.buckets if bucket.trainable]
        assert Counter(op.target for op in reduces) == Counter(b.name for b in trainable if reduces_now)
        by_name = {bucket.name: bucket for bucket in trainable}
        for op in reduces:
            assert {key.target for key in op.after} == set(by_name[op.target].units)
        second = [op for op in ops if op.stream == "replicate"]
        hybrid = 1 < plan.shards < plan.world_size
        assert len(second) == (len(trainable) if hybrid and last else 0)
        assert all(op.after == (Key("reduce_scatter", op.target, index, "backward"),) for op in second)


class TwoSteps:
    """Two steps in a row, and which ops are over before which start, whatever each of them takes."""

    def __init__(self, plan: Schedule, micro_batches: int) -> None:
        self.ops: list[tuple[int, Op]] = []
        self._before: list[int] = []
        found: dict[tuple[int, Key], int] = {}
        on_stream: dict[str, int] = {}
        fence = -1
        for step in (0, 1):
            if step:
                fence = on_stream["compute"]
            for op in plan.step(micro_batches):
                after = [on_stream[op.stream]] if op.stream in on_stream else []
                for key in op.after:
                    if key.micro_batch == PREVIOUS:
                        key = key._replace(micro_batch=micro_batches - 1)
                        after += [found[0, key]] if step else []
                    else:
                        after.append(found[step, key])
                if step:
                    after.append(fence)
                mask = 0
                for index in after:
                    mask |= self._before[index] | 1 << index
                found[step, op.key] = on_stream[op.stream] = len(self.ops)
                self.ops.append((step, op))
                self._before.append(mask)

    def over(self, first: int, second: int) -> bool:
        """Whether op `first` is complete when op `second` starts."""
        return bool(self._before[second] >> first & 1)

    def select(self, *kinds: str) -> list[tuple[int, int, Op]]:
        """(index, step, op) of some kinds."""
        return [(index, step, op) for index, (step, op) in enumerate(self.ops) if op.kind in kinds]


@settings(max_examples=examples(200))
@given(schedules(zero=3, share_parameters=False), micro_batch_counts)
def test_a_unit_computes_with_parameters_of_its_step_that_nothing_overwrites(plan, micro_batches: int) -> None:
    run = TwoSteps(plan, micro_batches)
    gathers = run.select("all_gather")
    unit_of = {bucket.name: bucket.units[0] for bucket in plan.layout.buckets if not bucket.kept}
    for compute, step, op in run.select("forward", "backward"):
        for bucket in plan.buckets_of.get(op.target, ()) if plan.shards > 1 else ():
            own = [g for g, when, gather in gathers if gather.target == bucket.name and when == step and g < compute]
            assert own, "gathered in this step"
            assert run.over(own[-1], compute)
            if bucket.kept:
                continue
            place = plan.slot[op.target]
            for other, _, gather in gathers:
                if other != own[-1] and plan.slot.get(unit_of.get(gather.target, "")) == place:
                    sibling = unit_of[gather.target] == op.target and gather.target != bucket.name
                    assert sibling or run.over(other, own[-1]) or run.over(compute, other)


@settings(max_examples=examples(300))
@given(schedules(), micro_batch_counts)
def test_gradients_are_not_copied_in_where_others_still_wait_to_be_reduced(plan, micro_batches: int) -> None:
    run = TwoSteps(plan, micro_batches)
    tenants: dict[int | str, list[tuple[int, list[int]]]] = defaultdict(list)
    by_name = {bucket.name: bucket for bucket in plan.layout.buckets}
    for reduction, step, op in run.select("reduce", "reduce_scatter", "all_reduce"):
        if op.stream != "reduce":
            continue
        bucket = by_name[op.target]
        copied = [
            index
            for index, when, copy in run.select("copy_in")
            if when == step and copy.target in bucket.units
            if copy.micro_batch == op.micro_batch or not plan.strategy.reduces_every_micro_batch
        ]
        assert all(run.over(index, reduction) for index in copied)
        place = plan.gradient_slot[bucket.name] if plan.reuses_gradient_slots else bucket.name
        tenants[place].append((reduction, copied))
    for rents in tenants.values():
        for (reduction, _), (_, copied) in itertools.pairwise(rents):
            assert all(run.over(reduction, index) for index in copied)


@given(schedules(), micro_batch_counts)
def test_the_update_has_all_gradients_and_the_next_forward_what_it_made_of_them(plan, micro_batches: int) -> None:
    run = TwoSteps(plan, micro_batches)
    updates = [index for index, _, _ in run.select("update")]
    assert len(updates) == 2
    for index, (step, op) in enumerate(run.ops):
        if op.phase != "update":
            assert run.over(index, updates[step]) or op.kind == "all_gather"
        elif op.target == READ:
            assert run.over(index, updates[step]), "nobody overwrites what another still computes with"
        elif op.kind != "update":
            assert run.over(updates[step], index)
    for forward, step, op in run.select("forward"):
        for index, when, sent in run.select("all_gather", "broadcast", "barrier"):
            if step == 1 and when == 0 and sent.phase == "update":
                mine = {WRITTEN, *(bucket.name for bucket in plan.buckets_of.get(op.target, ()))}
                idle = {b.name for b in plan.layout.buckets if not set(b.units) <= set(plan.order)}
                assert sent.target not in mine | idle or run.over(index, forward)


@given(schedules(zero=2), micro_batch_counts)
def test_statistics_come_after_the_norm_of_every_shard_is_known(plan: Schedule, micro_batches: int) -> None:
    run = TwoSteps(plan, micro_batches)
    for statistics, step, op in run.select("all_reduce"):
        if op.target == STATISTICS:
            for index, when, other in run.select("reduce_scatter", "all_reduce"):
                last = when == step and other.micro_batch == op.micro_batch and other.target != STATISTICS
                assert not last or plan.shards == 1 or run.over(index, statistics)


@given(st.data(), st.sampled_from([1, 2, 4, 6]), micro_batch_counts)
def test_with_shared_parameters_zero_3_does_what_zero_2_does(
    data: st.DataObject, world_size: int, micro_batches: int
) -> None:
    specs = data.draw(drawn.models())
    plans = []
    for zero in (2, 3):
        strategy = Strategy(zero=zero, share_parameters=True, bucket_mb=2e-4)  # type: ignore[arg-type]
        found = build_layout(specs, drawn.UNITS, strategy, world_size)
        plans.append(Schedule(found, strategy, world_size, 0, drawn.UNITS[1:], statistics=9))
    assert plans[0].layout == plans[1].layout
    if world_size > 1:
        assert plans[0].step(micro_batches) == plans[1].step(micro_batches)
        assert memory(plans[0], micro_batches) == memory(plans[1], micro_batches)
