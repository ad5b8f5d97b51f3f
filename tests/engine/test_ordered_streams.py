"""On a GPU's streams all that touches the same memory is in order, and no wait that makes it so can be left out."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

import paceline as pl
from paceline.core.ops import Op
from paceline.core.strategy import Strategy
from paceline.executor.executor import Executor
from tests.comm.fake_cuda import FakeCuda, FakeStream
from tests.engine import mutants
from tests.engine.models import HYBRID, STAGES, Stack, loss_on, make
from tests.engine.mutants import Mutant, mutated, without, without_after
from tests.engine.ordered_streams import ordered_streams
from tests.quick import some

POLICIES = {
    f"{name}, {policy}": replace(strategy, accumulation=policy)  # type: ignore[arg-type]
    for name, strategy in {**STAGES, **HYBRID}.items()
    for policy in ("auto", "each", "defer", "hold")
    if policy != "hold" or strategy.gathers
}


class Backwards(Stack):
    """Runs its blocks from the last to the first, and with a weight of a block that is not its turn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in reversed(self.blocks):
            x = x + block(x)
        y: torch.Tensor = self.head(x)
        return y + 1e-3 * self.blocks[1][0].weight.square().sum()  # type: ignore[index, operator, union-attr]


def wait_left_out(cuda: FakeCuda, wait: str) -> None:
    """Of the device's own waits one kind is ignored."""

    def ignores(kind: str, stream: FakeStream) -> bool:
        # Collectives run on streams of their own, the model on the default one.
        return wait == f"{kind} of {'computing' if stream is cuda.default else 'a collective'}"

    cuda.ignores = ignores


def races(strategy: Strategy, wait: str = "", taken: tuple[Mutant, ...] = ()) -> tuple[list[str], int]:
    """What nothing keeps apart in some steps of one rank, or what it raises; and how many pairs were looked at."""
    model = None
    try:
        with mutated(*taken), ordered_streams() as watch:
            wait_left_out(watch.cuda, wait)
            try:
                # Units that run in the other order than they are registered in.
                model = pl.parallelize(make(Backwards), strategy)
                train(model)
                pl.release(model)
            finally:
                if model is not None:
                    with suppress(Exception):
                        pl.engine_of(model).program.collectives.give_up(RuntimeError())  # type: ignore[union-attr]
                del model
        return sorted(watch.races), watch.pairs
    except Exception as error:
        pl.shutdown()
        return [f"{type(error).__name__}: {error}"], 0


def train(model: torch.nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        for seed in pl.accumulate(model, range(2)):
            loss_on(model, 10 * step + seed).backward()
        pl.clip_grad_norm_(model, 0.5)
        optimizer.step()
        if step == 1:
            with pl.full_parameters(model):
                assert all(parameter.isfinite().all() for parameter in model.parameters())
        optimizer.zero_grad()


def ranks_of(strategy: Strategy) -> int:
    return 4 if strategy.shard else 2


@pytest.mark.parametrize("name", some(POLICIES, ["zero 1, auto", "zero 3, auto"]))
def test_what_touches_the_same_memory_is_in_order(ranks, name: str) -> None:
    for found, pairs in ranks(ranks_of(POLICIES[name]), races, POLICIES[name]):
        assert found == [] and pairs > 1000


WAITS = ["wait_stream of a collective", "wait_event of a collective", "wait_event of computing"]
"""Collectives behind what was computed, and behind those of other streams; and computing behind collectives."""


@pytest.mark.parametrize("wait", some(WAITS, WAITS[:1]))
def test_no_wait_of_the_device_can_be_left_out(ranks, wait: str) -> None:
    for found, _ in ranks(4, races, HYBRID["zero 3, 2 x 2"], wait):
        assert found


# ---- waits and gates of the engine

ARRIVALS = without(Executor, "require_arrived")

ALONE = {
    ("update", "update"): "publish, before it on its stream, has waited for all that it comes after",
    ("forward", "forward"): "parameters are waited for when their unit needs them, too",
    ("unshard", "forward"): "as for forward",
    ("unshard", "backward"): "as for forward",
    ("all_gather", "forward"): "into a slot that is in use nothing is gathered, and what came too early is made again",
    ("all_gather", "backward"): "as in forward",
}
"""Ops that may come after nothing, as something else keeps the same order, and what."""


def without_gate(strategy: Strategy, kind: str, phase: str, stream: str) -> list[str]:
    """`races` where ops of one kind come after nothing."""
    return races(strategy, taken=(without_after(kind, phase=phase, stream=stream),))[0]


def gated(strategy: Strategy) -> list[tuple[str, str, str]]:
    """Kinds of op that come after something."""
    model = pl.parallelize(make(), strategy)
    loss_on(model, 0).backward()
    ops: tuple[Op, ...] = tuple(pl.engine_of(model).schedule.step(2))
    pl.release(model)
    return sorted({(op.kind, op.phase, op.stream) for op in ops if op.after and (op.kind, op.phase) not in ALONE})


GATED = {**STAGES, "zero 3, 2 x 2": HYBRID["zero 3, 2 x 2"]}


@pytest.mark.parametrize("name", some(GATED, ["zero 2"]))
def test_no_op_can_come_after_less(ranks, name: str) -> None:
    strategy, n = GATED[name], ranks_of(GATED[name])
    for kind, phase, stream in ranks(n, gated, strategy)[0]:
        assert any(ranks(n, without_gate, strategy, kind, phase, stream, timeout=20)), (kind, phase, stream)


TAKEN: dict[str, tuple[Strategy, tuple[Mutant, ...]]] = {
    "nothing waits": (STAGES["zero 0"], (without(Executor, "_wait"),)),
    "updates are not waited for": (STAGES["zero 1"], (without_after("forward"), ARRIVALS)),
    "gathered units are not waited for": (STAGES["zero 3"], (without_after("unshard"), ARRIVALS)),
    "no gate at all": (STAGES["zero 0"], (mutants.ungated,)),
    "what is gathered out of turn is not waited for": (STAGES["zero 3"], (mutants.gathers_out_of_turn_unwaited,)),
    "replicas do not follow shards": (HYBRID["zero 2, 2 x 2"], (mutants.not_behind,)),
}


def without_what(name: str) -> list[str]:
    strategy, taken = TAKEN[name]
    return races(strategy, taken=taken)[0]


@pytest.mark.parametrize("name", some(TAKEN, ["nothing waits"]))
def test_no_wait_of_the_engine_can_be_left_out(ranks, name: str) -> None:
    assert any(ranks(ranks_of(TAKEN[name][0]), without_what, name, timeout=20))
