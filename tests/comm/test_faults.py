"""What happens when ranks vanish or stop, and what is left when they are done."""

from __future__ import annotations

import os
import re
import signal
import subprocess
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
from tests.comm.told import wait_until_told
from tests.quick import diagonal, full
from tests.ranks import RankError, RankPool

LONG = 60.0
"""Seconds that nothing waits for on a machine however busy."""


def die_or_wait(leaves: str, told: Path) -> None:
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(64, torch.float32)
    pl.barrier()
    if world.rank == 1:
        # What is left lives until rank 0 has noticed.
        if leaves == "a program":
            lives = f"while ! [ -e '{told}' ]; do sleep 0.1; done"
            subprocess.Popen(["timeout", str(LONG), "sh", "-c", lives], close_fds=False)
        if leaves == "a child" and os.fork() == 0:
            wait_until_told(told, LONG)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CommunicationError, match="rank 1 is gone: rank 0 waited for it in all_reduce bucket 7"):
        transport.run("all_reduce", buffer, "bucket 7")
    seconds = time.monotonic() - start
    told.touch()
    raise AssertionError(f"noticed after {seconds:.3f} s")


@pytest.mark.parametrize(("transport", "leaves"), diagonal(("auto", "tcp"), ("nothing", "a child", "a program")))
def test_a_killed_peer_is_noticed_at_once_and_named_whatever_of_it_lives_on(ranks, tmp_path, transport, leaves) -> None:
    # Where other work has the cores it takes longer, but not each time.
    for attempt in range(6):
        with pytest.raises(RankError, match=r"noticed after \d+\.\d+ s") as caught:
            ranks(2, die_or_wait, leaves, tmp_path / f"told-{attempt}", transport=transport)
        if is_at_once := re.search(r"noticed after 0\.\d+ s", str(caught.value)) is not None:
            break
    assert is_at_once, str(caught.value)


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


def file_of_a_shared_buffer() -> str:
    """What the kernel calls the file that it lies in."""
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(1 << 20, torch.float32)
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(place, 16) for place in line.split()[0].split("-"))
        if start <= buffer.data_ptr() < end:
            file = line.split(maxsplit=5)[5]
    transport.close()
    return file


def test_shared_buffers_have_no_name(ranks) -> None:
    for file in ranks(2, file_of_a_shared_buffer):
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
