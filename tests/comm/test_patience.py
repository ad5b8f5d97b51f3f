"""How long a silent rank is waited for, in a loop that tells of its steps."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import paceline as pl
from paceline.comm import patience
from paceline.comm.connect import open_transport
from paceline.comm.control import all_gather_json
from paceline.comm.patience import StepPatience, limit
from paceline.comm.transport import CommunicationError
from tests.quick import full
from tests.ranks import RankError, RankPool


def be_silent_between_steps(how: str, transport_kind: str) -> str:
    world = pl.init()
    transport = open_transport(world, kind=transport_kind)
    buffer = transport.allocate(64, torch.float32)
    patience.SHORTEST_SECONDS = 0.5
    pids = all_gather_json(os.getpid())
    steps = StepPatience()
    steps.step()
    steps.step()
    try:
        if world.rank == 1 and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
            return ""
        if world.rank == 1:
            time.sleep(2)
            return ""
        with pytest.raises(CommunicationError) as caught:
            transport.run("all_reduce", buffer, "bucket 7") if how == "collective" else all_gather_json(0, "the end")
        return str(caught.value).replace(str(pids[1]), "PID")
    finally:
        if world.rank == 0 and how == "stopped":
            os.kill(pids[1], signal.SIGCONT)
        steps.pause()
        transport.close()


@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [
        full("collective", "auto", "rank 1 did not answer within 0.5 s: rank 0 waited for it in all_reduce"),
        full("collective", "tcp", "rank 1 did not answer within 0.5 s: rank 0 waited for it in all_reduce"),
        full(
            "stopped",
            "auto",
            "; rank 1's process PID is stopped: `kill -CONT PID` lets it go on; rank 1 gives no sign of life",
        ),
        (
            "message",
            "auto",
            "a rank is gone or did not answer within 0.5 s in the end; rank 1 never entered it: last seen ",
        ),
    ],
)
def test_short_steps_shorten_the_wait_for_a_silent_rank(ranks, how: str, kind: str, told: str) -> None:  # type: ignore[no-untyped-def]
    try:
        assert told in ranks(2, be_silent_between_steps, how, kind)[0]
    finally:
        ranks.close()


def test_the_limit_follows_the_slowest_step_and_is_lifted_for_what_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    steps = StepPatience()
    steps.step()
    assert limit(600) == 600
    now += 0.001
    steps.step()
    assert limit(600) == 60
    assert limit(5) == 5
    now += 2
    steps.step()
    now += 1
    steps.step()
    assert limit(600) == 200
    steps.pause()
    assert limit(600) == 600
    now += 100
    steps.step()
    now += 0.1
    steps.step()
    assert limit(600) == 200
    steps.pause()


def test_a_limit_that_somebody_chose_holds() -> None:
    steps = StepPatience(given=True)
    steps.step()
    steps.step()
    assert limit(600) == 600
    steps.pause()


def told_that_a_rank_is_gone(how: str) -> tuple[str, float]:
    """What a rank that waits raises when somebody knows better, and the seconds until it has left the job."""
    world = pl.init()
    transport = open_transport(world, kind="tcp")
    buffer = transport.allocate(64, torch.float32)
    all_gather_json(0, "ready")
    began = time.monotonic()
    if world.rank == 1:
        # The other has gone when this ends, and nothing has told it so.
        time.sleep(3)
        os._exit(0)
    patience.end_waits_when(lambda: "rank 1 is gone: somebody knows" if time.monotonic() > began + 0.5 else "")
    try:
        with pytest.raises(CommunicationError) as caught:
            transport.run("all_reduce", buffer, "bucket 7") if how == "collective" else all_gather_json(0, "the end")
        transport.close()
        pl.shutdown()
        return str(caught.value), time.monotonic() - began
    finally:
        patience.end_waits_when(str)


@pytest.mark.full
@pytest.mark.parametrize("how", ["control message", full("collective")])
def test_who_waits_may_be_told_that_nobody_will_answer(ranks: RankPool, how: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, told_that_a_rank_is_gone, how)
    assert "rank 0: ok\n('rank 1 is gone: somebody knows'" in str(caught.value)
    seconds = float(str(caught.value).partition("somebody knows', ")[2].partition(")")[0])
    # And not until Gloo's own time limit, of a minute.
    assert seconds < 30
