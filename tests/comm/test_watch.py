"""Jobs that hang: within the time limit every rank says where it is, and those that wait say who never came."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from paceline import comm
from paceline.comm.connect import open_transport
from paceline.comm.cpu import registry
from paceline.comm.transport import CommunicationError
from tests.quick import full
from tests.train.conftest import nano, text  # noqa: F401
from tests.train.processes import finished, paceline, program, torchrun

LIMIT = 9.0
ROOT = str(Path(__file__).parents[2])


@contextlib.contextmanager
def own_stderr() -> Iterator[io.StringIO]:
    said, before = io.StringIO(), sys.stderr
    sys.stderr = said
    try:
        yield said
    finally:
        sys.stderr = before


def fetch(seconds: float) -> None:
    time.sleep(seconds)


KEPT: list[Any] = []
"""Of an earlier job, and not yet collected."""


def hang_in(what: str, kind: str) -> tuple[str, str]:
    """The last of some ranks sleeps while the others wait for it; what each raises and prints."""
    KEPT.append(open_transport(pl.init(), kind=kind))
    for _ in range(9):
        KEPT[-1].run("all_reduce", torch.ones(4), "of an earlier job")
    pl.shutdown()
    world = pl.init(device="cpu")
    transport = open_transport(replace(world, timeout=2.0), kind=kind)
    buffer = transport.allocate(64, torch.float32)
    transport.run("all_reduce", buffer, "bucket 6")
    told = ""
    with own_stderr() as said:
        if world.rank == world.world_size - 1:
            fetch(8.0)
        else:
            with pytest.raises(CommunicationError) as caught:
                transport.run(what, buffer, "bucket 7")
            told = str(caught.value)
            time.sleep(3.0)
    transport.close()
    return told, said.getvalue()


@pytest.mark.parametrize(
    ("n", "what", "kind"),
    [
        (3, "all_reduce", "auto"),
        full(3, "all_reduce/ring", "tcp"),
    ],
)
def test_who_never_entered_a_collective_is_named_with_where_it_is_and_all_print_their_stacks(
    ranks: Any, n: int, what: str, kind: str
) -> None:
    # Of a hundred threads that other tests have left the oldest would not be told.
    ranks.close()
    try:
        *waiting, last = ranks(n, hang_in, what, kind)
    finally:
        ranks.close()
    first = re.compile(
        rf"did not answer within 2 s: .* bucket 7 .*; rank {n - 1} never entered it: last seen \d+\.\d s ago in the "
        r"program's own code [^;]*, at test_watch\.py:\d+ in fetch"
    )
    assert any(first.search(told) for told, _ in waiting), waiting
    assert all(f"rank {n - 1} never entered it" in told or "gave up" in told for told, _ in waiting)
    for rank, (_, said) in enumerate([*waiting, last]):
        head = rf"rank {rank} of {n}, process \d+, while rank \d waits in vain: for .*\nthread MainThread:\n"
        assert re.match(head, said)
        assert said.count("waits in vain") == 1
    assert re.search(r"test_watch\.py:\d+ in fetch", last[1])
    assert all("in fetch" not in said for _, said in waiting)


def count_in_two(collectives: tuple[int, int]) -> list[int]:
    transports = [open_transport(pl.init()) for _ in collectives]
    for transport, times in zip(transports, collectives, strict=True):
        for _ in range(times):
            transport.run("all_reduce", torch.ones(4), "of two transports")
    numbers = [registry.entered()[transport.identity] for transport in transports]
    for transport in transports:
        transport.close()
    return numbers


def test_collectives_are_counted_by_transport(ranks: Any) -> None:
    first, second = ranks(2, count_in_two, (1, 5))
    assert first == second
    assert first[1] - first[0] == 4


LOOP = f"""
import ctypes, os, signal, sys, time
import torch
import paceline as pl

how = sys.argv[1]
world = pl.init(device="cpu", timeout={LIMIT})
model = pl.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), pl.Strategy(zero=2))
optimizer = torch.optim.AdamW(model.parameters())

def fetch(step):
    if step == 3 and world.rank == world.world_size - 1:
        # Longer than between two signs of life, however busy the machine is.
        time.sleep(4.0)
        while how == "loop" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            pass
        if how == "native":
            ctypes.PyDLL(None).sleep(1000)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    if how == "stop first" and step == 3 and world.rank == 0:
        time.sleep(4.0)
        os.kill(os.getpid(), signal.SIGSTOP)
    return torch.randn(8, 4)

for step in range(5):
    loss = model(fetch(step)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
"""


def ranks_say(folder: Path, how: str, waits: int) -> str:
    """What two ranks print that nobody has started together, of which one waits and the other is ended then."""
    (folder / "loop.py").write_text(LOOP)
    environment = {
        "PYTHONPATH": ROOT,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "PACELINE_RENDEZVOUS": f"file://{folder}/store",
    }
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(program([sys.executable, "loop.py", how], folder, {**environment, "RANK": str(rank)}))
            for rank in range(2)
        ]
        status, _, err = started[waits].finish()
        assert status == 1
        started[1 - waits].process.kill()
        return err + started[1 - waits].finish()[2]


def stacks_of(err: str) -> set[int]:
    """Ranks that printed where they are."""
    heads = re.findall(r"^rank (\d) of \d, process \d+, while rank \d waits in vain: ", err, re.M)
    return {int(rank) for rank in heads}


@pytest.mark.full
def test_an_endless_loop_in_python_under_torchrun_is_told_and_then_the_job_starts_again(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    environment = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    status, out, err = finished(torchrun(2, "--max-restarts", "1", "loop.py", "loop"), tmp_path, environment)
    assert (status, out.count("done")) == (0, 2)
    assert stacks_of(err) == {0, 1}
    assert re.search(
        rf"did not answer within {LIMIT:g} s: .* reduce_scatter bucket 0.*; rank 1 never entered it: last seen "
        r"\d+\.\d s ago in the program's own code after update of optimizer, at loop\.py:\d+ in fetch; bucket 0 holds "
        r"1\.weight to 0\.bias",
        err,
    )
    waits = r"^rank 0 .* s in paceline after .*, at loop\.py:\d+ in <module>; communicates reduce_scatter bucket 0"
    assert re.search(waits, err, re.M)
    assert re.search(r"^rank 1 .* in fetch; communicates nothing$", err, re.M)


@pytest.mark.full
def test_native_code_that_keeps_the_interpreter(tmp_path: Path) -> None:
    err = ranks_say(tmp_path, "native", waits=0)
    # By the signal, which asks no interpreter.
    assert re.search(r'^Current thread .*\n  File ".*loop\.py", line \d+ in fetch$', err, re.M)
    assert 0 in stacks_of(err)
    assert re.search(r"rank 1 gives no sign of life: last seen \d+\.\d s ago in .* in fetch", err)


@pytest.mark.full
@pytest.mark.parametrize(("how", "rank"), [("stop", 1), ("stop first", 0)])
def test_a_stopped_rank_is_named_with_where_it_was_last_seen(tmp_path: Path, how: str, rank: int) -> None:
    err = ranks_say(tmp_path, how, waits=1 - rank)
    assert stacks_of(err) == {1 - rank}
    assert re.search(rf"rank {rank}'s process \d+ is stopped", err)
    assert re.search(rf"rank {rank} .*gives no sign of life: last seen \d+\.\d s ago in .*loop\.py:\d+ in fetch", err)


SLOW_DATA = """
import os, time
import paceline.data.loader as loader

made, make = [], loader._micro_batch

def wait_for_a_disk(*arguments):
    made.append(1)
    if len(made) > 40 and os.environ.get("RANK") == "1":
        time.sleep(1000)
    return make(*arguments)

loader._micro_batch = wait_for_a_disk
"""


@pytest.mark.full
def test_data_that_do_not_come_on_one_rank_of_the_trainer(nano: list[str], tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "sitecustomize.py").write_text(SLOW_DATA)
    flags = ("--workers", "2", "--steps", "1000", "--log.validate_every", "0", "--timeout", f"{LIMIT:g}")
    status, _, err = finished(
        paceline("train", *nano, *flags), tmp_path, {"PYTHONPATH": os.pathsep.join((str(tmp_path), ROOT))}
    )
    assert status == 1
    assert re.search(r"^rank 0 of 2, process \d+, while rank 0 waits in vain: ", err, re.M)
    assert re.search(r"^\[rank 1\] rank 1 of 2, process \d+, while rank 0 waits in vain: ", err, re.M)
    assert re.search(r"^\[rank 1\]   \S+sitecustomize\.py:\d+ in wait_for_a_disk$", err, re.M)
    assert re.search(r"rank 1 never entered it: last seen \d+\.\d s ago in data loading, at ", err)


def wait_in_a_message(told: Path) -> str:
    """Rank 1 never comes to a barrier: it waits until rank 0 has given it up."""
    if pl.init().rank == 1:
        while not told.exists():
            fetch(0.1)
        return ""
    with pytest.raises(CommunicationError) as caught:
        pl.barrier()
    told.touch()
    return str(caught.value)


@pytest.mark.full
def test_who_never_came_to_a_barrier_is_named(ranks: Any, tmp_path: Path) -> None:
    try:
        # Its limit is that of the test, too, which has five seconds more.
        told = ranks(2, wait_in_a_message, tmp_path / "told", timeout=6)[0]
    finally:
        ranks.close()
    assert re.search(
        r"rank 1 never entered it: last seen \d+\.\d s ago in .* at test_watch\.py:\d+ in (fetch|wait_in_a_message)",
        told,
    )


def leave_and_join() -> int:
    """Ends the job and joins another, whose transports count anew; returns how many threads watch."""
    import threading

    pl.shutdown()
    os.environ["PACELINE_RENDEZVOUS"] += "-again"
    pl.init(device="cpu")
    comm.all_reduce(torch.ones(4))
    return sum(thread.name == "paceline watch" for thread in threading.enumerate())


def test_a_job_that_follows_another_is_watched_over_by_a_thread_of_its_own(ranks: Any) -> None:
    try:
        assert ranks(2, leave_and_join) == [1, 1]
    finally:
        ranks.close()
