"""What happens when ranks vanish, stop or fail, and what is left when they are done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import paceline as pl
from paceline.comm.connect import open_transport
from paceline.comm.streams import ThreadStream
from paceline.comm.transport import CommunicationError
from tests.quick import diagonal, full
from tests.ranks import RankError, RankPool
from tests.train.processes import new_in_shared_memory


def die_or_wait(leaves: str) -> None:
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(64, torch.float32)
    pl.barrier()
    if world.rank == 1:
        if leaves == "a program":
            subprocess.Popen(["sleep", "1.5"], close_fds=False)
        if leaves == "a child" and os.fork() == 0:
            time.sleep(1.5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CommunicationError, match="rank 1 is gone: rank 0 waited for it in all_reduce bucket 7"):
        transport.run("all_reduce", buffer, "bucket 7")
    raise AssertionError(f"noticed after {time.monotonic() - start:.3f} s")


@pytest.mark.parametrize(("transport", "leaves"), diagonal(("auto", "tcp"), ("nothing", "a child", "a program")))
def test_a_killed_peer_is_noticed_at_once_and_named_whatever_of_it_lives_on(ranks, transport, leaves) -> None:
    with pytest.raises(RankError, match=r"noticed after 0\.\d+ s"):
        ranks(2, die_or_wait, leaves, transport=transport)


def wait_until_told(told: Path) -> None:
    """What a rank does that is elsewhere: nothing, until another has seen what it was to see, or for long after."""
    deadline = time.monotonic() + 4
    while not told.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def be_silent(told: Path) -> Any:
    world = pl.init()
    transport = open_transport(replace(world, timeout=0.5))
    buffer = transport.allocate(64, torch.float32)
    if world.rank == 1:
        wait_until_told(told)
        transport.close()
        return ""
    with pytest.raises(CommunicationError) as caught:
        transport.run("all_reduce", buffer, "bucket 7")
    told.touch()
    transport.close()
    return str(caught.value)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_silent_peer_is_named_within_the_time_limit(ranks, tmp_path, transport) -> None:
    assert "rank 1 did not answer within 0.5 s" in ranks(2, be_silent, tmp_path / "told", transport=transport)[0]


def be_stopped(collective: str) -> str:
    world = pl.init()
    transport = open_transport(replace(world, timeout=0.5))
    buffer = transport.allocate(64, torch.float32)
    pids = pl.all_gather_json(os.getpid())
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        transport.close()
        return ""
    try:
        with pytest.raises(CommunicationError) as caught:
            transport.run(collective, buffer, "bucket 7")
    finally:
        if world.rank == 0:
            # When all have waited in vain.
            time.sleep(1.5)
            os.kill(pids[1], signal.SIGCONT)
    transport.close()
    return str(caught.value).replace(str(pids[1]), "PID")


@pytest.mark.parametrize(
    ("n", "collective"), [(2, "all_reduce"), full(4, "all_reduce/ring"), full(4, "broadcast/tree@1")]
)
def test_a_stopped_peer_is_named_with_what_lets_it_go_on_also_by_those_who_wait_for_others(
    ranks, n, collective
) -> None:
    for message in (told for told in ranks(n, be_stopped, collective) if told):
        assert "did not answer within 0.5 s" in message
        assert "rank 1's process PID is stopped: `kill -CONT PID` lets it go on" in message


def shared_memory_names() -> tuple[set[str], str]:
    """What /dev/shm holds while a buffer is shared, and what the kernel calls the file that the buffer lies in."""
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(1 << 20, torch.float32)
    names = {entry.name for entry in Path("/dev/shm").iterdir()}
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(place, 16) for place in line.split()[0].split("-"))
        if start <= buffer.data_ptr() < end:
            file = line.split(maxsplit=5)[5]
    transport.close()
    return names, file


def test_shared_buffers_have_no_name(ranks) -> None:
    before = {entry.name for entry in Path("/dev/shm").iterdir()}
    for names, file in ranks(2, shared_memory_names):
        assert names <= before
        assert file.startswith("/memfd:") and file.endswith(" (deleted)")


def close_while_waiting() -> float:
    """Rank 0 waits for a collective that rank 1 never joins, and gives up of its own accord."""
    world = pl.init()
    transport, stream = open_transport(world), ThreadStream("test")
    buffer = transport.allocate(64, torch.float32)
    pl.barrier()
    start = time.monotonic()
    if world.rank == 0:
        pending = stream.submit(lambda: transport.run("all_reduce", buffer, "bucket 7"), "bucket 7")
        time.sleep(0.2)
        transport.close()
        stream.close()
        assert isinstance(pending.error, CommunicationError)
    pl.barrier()
    stream.close()
    transport.close()
    return time.monotonic() - start


def test_closing_wakes_a_stream_that_waits_for_a_peer(ranks) -> None:
    assert max(ranks(2, close_while_waiting)) < 30


def wait_for_one_that_fails(collective: str) -> tuple[str, str]:
    """What all ranks are told where the last fails, in a collective that passes from rank to rank; and again after."""
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(64, torch.float32)
    pl.barrier()
    if world.rank == world.world_size - 1:
        time.sleep(0.1)
        transport.abort("ValueError: a broken batch")
    told = []
    for _ in range(2):
        with pytest.raises(CommunicationError) as caught:
            transport.run(collective, buffer, "bucket 7")
        told.append(str(caught.value))
    pl.barrier()
    transport.close()
    return told[0], told[1]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("collective", ["all_reduce", "all_reduce/ring", "all_reduce/tree"])
def test_what_failed_first_is_what_every_rank_raises(ranks, transport, n, collective) -> None:
    *others, last = ranks(n, wait_for_one_that_fails, collective, transport=transport)
    assert last == ("ValueError: a broken batch",) * 2
    assert others == [(f"rank {n - 1} gave up: ValueError: a broken batch",) * 2] * (n - 1)


def wait_for_one_that_knows_of_nothing(collective: str, inside: bool, told: Path) -> tuple[str, float]:
    """Rank 0 fails; rank 1 waits for rank 2, which is elsewhere and sees nothing of it."""
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(63, torch.float32)
    pl.barrier()
    start, message = time.monotonic(), ""
    if world.rank == 0 and not inside:
        transport.abort("ValueError: in the loop")
    elif world.rank == 0:
        stream = ThreadStream("gather")
        pending = stream.submit(lambda: transport.run(collective, buffer, "bucket 1"), "bucket 1")
        time.sleep(0.3)
        transport.abort("ValueError: in the loop")
        with pytest.raises(CommunicationError):
            stream.wait(pending)
        stream.close()
    elif world.rank == 1:
        with pytest.raises(CommunicationError) as caught:
            transport.run(collective, buffer, "bucket 1")
        message = str(caught.value)
    seconds = time.monotonic() - start
    if world.rank == 1:
        told.touch()
    elif world.rank == 2:
        # In a barrier it would see that rank 1 waits for it.
        wait_until_told(told)
    pl.barrier()
    transport.close()
    return message, seconds


# Between sockets, rank 1 exchanges messages with rank 2 alone.
@pytest.mark.parametrize(("transport", "collective"), [("auto", "all_gather"), ("tcp", "broadcast/tree@2")])
@pytest.mark.parametrize("inside", [True, False])
def test_who_waits_for_a_rank_that_knows_of_nothing_is_told_of_another_one_that_failed(
    ranks, tmp_path, transport: str, collective: str, inside: bool
) -> None:
    place = tmp_path / "told"
    told = ranks(3, wait_for_one_that_knows_of_nothing, collective, inside, place, transport=transport)
    message, seconds = told[1]
    assert message == "rank 0 gave up: ValueError: in the loop"
    assert seconds < 3


def train_until_one_leaves(fails: bool) -> None:
    """Rank 1 leaves the job after two steps, and rank 0 goes on."""
    world = pl.init()
    model = pl.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), pl.Strategy(zero=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(4):
            if world.rank == 1 and step == 2:
                if fails:
                    raise ValueError("a broken batch")
                return
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    finally:
        pl.shutdown()


def told_of_one_that_leaves(fails: bool) -> str:
    try:
        train_until_one_leaves(fails)
    except (CommunicationError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("transport", ["auto", full("tcp")])
@pytest.mark.parametrize("fails", [False, True])
def test_who_waits_for_a_rank_that_leaves_the_job_is_told_why(ranks, transport: str, fails: bool) -> None:
    told, _ = ranks(2, told_of_one_that_leaves, fails, transport=transport)
    cause = "ValueError: a broken batch" if fails else "pl.shutdown() while models were parallel: pl.release them first"
    assert told.startswith(f"rank 1 gave up: {cause}")


def abort_while_waiting() -> str:
    """What rank 0's thread raises that waits for rank 1, when its own main thread aborts."""
    world = pl.init()
    transport, stream = open_transport(world), ThreadStream("test")
    buffer = transport.allocate(64, torch.float32)
    told = ""
    if world.rank == 0:
        pending = stream.submit(lambda: transport.run("all_reduce", buffer, "bucket 7"), "bucket 7")
        time.sleep(0.1)
        transport.abort("ValueError: a broken batch")
        with pytest.raises(CommunicationError) as caught:
            stream.wait(pending)
        told = str(caught.value)
    pl.barrier()
    stream.close()
    transport.close()
    return told


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_thread_of_the_rank_that_failed_raises_the_cause_too(ranks, transport) -> None:
    assert ranks(2, abort_while_waiting, transport=transport)[0] == "ValueError: a broken batch"


UNCAUGHT = """
import sys
import torch
import paceline as pl
from paceline import comm

if __name__ == "__main__":
    rank = pl.init(device="cpu", timeout=60).rank
    comm.all_reduce(torch.ones(4))
    if rank == 1:
        raise ValueError("a broken batch")
    comm.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize("transport", ["auto", full("tcp")])
def test_an_exception_that_ends_one_rank_stands_last_on_the_others_and_nothing_hangs(tmp_path, transport) -> None:
    before = set(os.listdir("/dev/shm"))
    program = tmp_path / "program.py"
    program.write_text(UNCAUGHT)
    began = time.monotonic()
    ranks = []
    for rank in range(3):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "3",
            "PACELINE_RENDEZVOUS": f"file://{tmp_path}/store",
            "PACELINE_TRANSPORT": transport,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        ranks.append(
            subprocess.Popen([sys.executable, str(program)], env=environment, stderr=subprocess.PIPE, text=True)
        )
    # Torch says before each line which rank it is of.
    told = [rank.communicate(timeout=60)[1].strip().splitlines()[-1].partition(": ")[2] for rank in ranks]
    assert time.monotonic() - began < 50
    cause = "ValueError: a broken batch"
    lost = f"paceline.comm.transport.CommunicationError: rank 1 gave up: {cause}"
    assert told == [lost, cause, lost]
    assert not new_in_shared_memory(before)


def left_after_shutdown() -> bool:
    """Whether torch's process group is still held after the job has ended."""
    pl.init()
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    group = weakref.ref(torch.distributed.group.WORLD)
    pl.shutdown()
    return group() is not None


def test_nothing_holds_the_process_group_when_the_job_has_ended() -> None:
    # A thread of it that lives on may abort the interpreter's exit. In new processes: what is imported late matters.
    alone = RankPool()
    try:
        assert alone(2, left_after_shutdown) == [False, False]
    finally:
        alone.close()


def many_small_calls() -> None:
    world = pl.init()
    # Asleep at once, and not looking up by itself: what is not woken stays asleep until the test's time limit.
    with patch("paceline.comm.cpu.signals.SPINS", 1), patch("paceline.comm.cpu.signals._POLL_SECONDS", 60.0):
        transport = open_transport(world)
        buffer = transport.allocate(64, torch.float32)
        for _ in range(3000):
            transport.run("all_reduce", buffer, "test")
        transport.close()


@pytest.mark.parametrize("n", [2, 3])
def test_who_sleeps_is_always_woken(ranks, n) -> None:
    ranks(n, many_small_calls, timeout=30)
