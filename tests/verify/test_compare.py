"""What is right is found equal; what is wrong is found, and what made it wrong is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.strategy import SYSTEMS, Strategy
from paceline.verify.compare import Comparison
from paceline.verify.explain import explain
from paceline.verify.parallel_run import Case
from paceline.verify.recipe import recipe_for
from tests.quick import diagonal, full
from tests.verify.conftest import BROKEN, HERE, spec

SMALL = 0.0005
STAGES = {f"zero {stage}": Strategy(zero=stage, bucket_mb=SMALL) for stage in (0, 1, 2, 3)}
quickly_zero_3 = pytest.mark.parametrize(
    "strategy", [*map(full, list(STAGES.values())[:3]), STAGES["zero 3"]], ids=STAGES
)


@pytest.mark.parametrize(
    ("strategy", "micro_batches"), diagonal({**STAGES, "server": SYSTEMS["parameter server"]}, [1, 3])
)
def test_a_right_model_is_equal_and_everything_was_compared(compare, strategy: Strategy, micro_batches: int) -> None:
    outcome = compare(spec(), strategy, micro_batches)
    assert outcome.verdict == "equal", outcome
    assert set(outcome.report.largest) == {"weights", "loss", "gradient", "norm", "updated"}
    assert max(outcome.report.largest.values()) < 1e-12


@pytest.mark.parametrize("stage", [full(1), full(2), 3])
def test_hybrid_sharding_is_equal(compare, stage: int) -> None:
    outcome = compare(spec(), Strategy(zero=stage, shard=2, bucket_mb=SMALL), ranks=4, micro_batches=3)
    assert outcome.verdict == "equal"


@quickly_zero_3
def test_weights_in_another_memory_format_are_compared_element_by_element(compare, strategy: Strategy) -> None:
    outcome = compare(spec("pictures", data=f"{HERE}:images", loss=""), strategy)
    assert outcome.verdict == "equal", outcome


@quickly_zero_3
def test_other_weights_at_the_start_are_laid_to_build(compare, strategy: Strategy) -> None:
    first = compare(spec("other_weights"), strategy).report.first
    assert first is not None and (first.kind, first.step, first.parameter) == ("weights", 0, "norm.bias")
    assert explain(first).startswith("before the first step norm.bias") and "build gave" in explain(first)


# (model, what is named: kind, step, rank, unit, op)
MISTAKES = {
    "uses_rank": ("output", 0, 1, "blocks.1", "forward"),
    "keeps_plain_tensor": ("output", 0, 1, "blocks.1", "forward"),
    "backward_uses_rank": ("local", 0, 1, "blocks.1", "backward"),
    "running_mean": ("output", 0, 1, "blocks.1", "forward"),
}


@pytest.mark.parametrize(("model", "strategy"), diagonal(MISTAKES.keys(), STAGES))
def test_a_mistake_in_the_model_is_found_where_it_is(compare, model: str, strategy: Strategy) -> None:
    outcome = compare(spec(model), strategy)
    kind, step, rank, unit, op = MISTAKES[model]
    first = outcome.report.first
    assert outcome.verdict == "differs" and first is not None, outcome.details
    assert (first.kind, first.step, first.micro_batch, first.unit, first.op) == (kind, step, 0, unit, op)
    assert rank == first.rank
    assert f"step {step}, micro-batch 0, rank {first.rank}" in explain(first) and f"{op} of {unit}" in explain(first)


@pytest.mark.parametrize("stage", [full(0), full(1), full(2), 3])
def test_what_a_model_keeps_of_a_parameter_stays_that_or_is_refused(compare, stage: int) -> None:
    outcome = compare(spec("keeps_alias"), STAGES[f"zero {stage}"])
    if stage < 3:
        assert outcome.verdict == "equal", outcome.details
    else:
        assert outcome.verdict == "raises" and "blocks.1.inner.weight" in outcome.raised, outcome


def test_the_first_wrong_gradient_is_that_of_the_wrong_operation(compare) -> None:
    # Backward goes through `outer` last, which is the first parameter of the block that has a wrong gradient.
    first = compare(spec("backward_uses_rank"), STAGES["zero 2"]).report.first
    assert first is not None and first.parameter.startswith("blocks.1.outer.")


@quickly_zero_3
def test_a_loss_that_depends_on_the_rank_is_found_behind_all_units(compare, strategy: Strategy) -> None:
    first = compare(spec(loss=f"{HERE}:loss_of_rank"), strategy).report.first
    assert first is not None and (first.kind, first.rank, first.op) == ("loss", 1, "forward")
    assert "outside of all units" in explain(first)


def test_buffers_that_forward_changes_are_named(prepared, compare) -> None:
    changing = prepared(spec("running_mean")).changing
    assert changing == ("blocks.1.mean",)
    first = compare(spec("running_mean"), STAGES["zero 0"]).report.first
    assert "blocks.1.mean" in explain(first, changing)


@pytest.mark.parametrize("stage", [full("zero 2"), "zero 3"])
def test_a_parameter_may_be_read_outside_its_unit(compare, stage: str) -> None:
    assert compare(spec("reads_neighbour"), STAGES[stage]).verdict == "equal"


def test_a_job_that_hangs_is_given_up_with_its_stacks(prepared, single, two, tmp_path) -> None:
    model = spec("never_ends")
    prepared(model)
    case = Case(Strategy(), recipe_for(Strategy(), 2, 3, 3), 1e-9)
    outcome = Comparison(model, single, two, tmp_path, limit=2).run(case)
    assert outcome.verdict == "raises" and outcome.raised.endswith("gave no answer within 2 s")
    assert "user_models.py" in outcome.details and "in forward" in outcome.details


HYBRID = Strategy(zero=2, shard=2, bucket_mb=SMALL)

# (what is broken, strategy, ranks, what is named: kind, bucket, op)
BREAKAGES = [
    full("wrong_reduce_scatter", STAGES["zero 1"], 2, "gradient", "bucket 1", "reduce_scatter"),
    ("wrong_reduce_scatter", STAGES["zero 2"], 2, "gradient", "bucket 1", "reduce_scatter"),
    ("wrong_all_reduce", STAGES["zero 0"], 2, "gradient", "bucket 1", "all_reduce"),
    full("wrong_all_gather", STAGES["zero 1"], 2, "weights", "bucket 1", "all_gather"),
    ("wrong_all_gather", STAGES["zero 2"], 2, "weights", "bucket 1", "all_gather"),
    ("wrong_all_gather_of_block", STAGES["zero 3"], 2, None, "blocks.1 float64", "all_gather"),
    ("wrong_broadcast", SYSTEMS["parameter server"], 2, "updated", "bucket 0", "broadcast"),
    ("wrong_copy_in", STAGES["zero 0"], 2, "copied in", None, "copy_in"),
    full("wrong_copy_in", STAGES["zero 3"], 2, "copied in", "blocks.1 float64", "copy_in"),
    full("wrong_update", STAGES["zero 0"], 2, "updated", None, "update"),
    ("wrong_update", STAGES["zero 3"], 2, "updated", None, "update"),
    ("wrong_counts", STAGES["zero 0"], 2, "loss", "", "all_reduce of the counts"),
    full(
        "wrong_reduce_scatter", Strategy(zero=2, shard=2, bucket_mb=SMALL), 4, "reduced", "bucket 1", "reduce_scatter"
    ),
    full("wrong_all_reduce", Strategy(zero=2, shard=2, bucket_mb=SMALL), 4, "gradient", "bucket 1", "all_reduce"),
]


@pytest.mark.parametrize(("model", "strategy", "ranks", "kind", "bucket", "op"), BREAKAGES)
def test_a_wrong_operation_of_the_engine_is_named(compare, model, strategy, ranks, kind, bucket, op) -> None:
    outcome = compare(spec(model, BROKEN), strategy, ranks=ranks)
    first = outcome.report.first
    assert outcome.verdict == "differs" and first is not None, outcome.details
    assert first.op == op and kind in (None, first.kind) and bucket in (None, first.bucket), first
    assert op in explain(first)


@pytest.mark.parametrize(
    ("precision", "strategy"),
    diagonal(["bfloat16", "float16"], {name: STAGES[name] for name in ("zero 0", "zero 2")}),
)
def test_low_precision_is_compared_with_a_loop_of_low_precision(compare, strategy: Strategy, precision: str) -> None:
    low = replace(strategy, precision=precision)
    assert compare(spec(dtype="float32"), low, tolerance=1e-5).verdict == "equal"


def test_low_precision_is_not_taken_for_full_precision(compare, single, two, tmp_path) -> None:
    """The reference rounds too: one that does not is told from it."""
    model = spec(dtype="float32")
    low = Strategy(precision="bfloat16", bucket_mb=SMALL)
    compare(model, low)
    full = Case(low, recipe_for(Strategy(), 2, 3, 3), 1e-5)
    outcome = Comparison(model, single, two, tmp_path, limit=60).run(full)
    assert outcome.verdict == "differs"
