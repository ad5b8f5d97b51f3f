"""What failed first is what every rank raises, whomever it waits for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import paceline as pl
from paceline.comm.connect import open_transport
from paceline.comm.streams import ThreadStream
from paceline.comm.transport import CommunicationError
from tests.comm.told import wait_until_told
from tests.quick import diagonal, full
from tests.train.processes import new_in_shared_memory


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


class Broken(ValueError):
    """A failure that knows when it was."""

    def __init__(self) -> None:
        super().__init__("a broken batch")
        self.at = time.monotonic()


def broken(*_: object) -> None:
    raise Broken


def train_until_one_leaves(how: str) -> None:
    """Rank 1 leaves the job in its third step, and rank 0 goes on."""
    world = pl.init()
    model = pl.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), pl.Strategy(zero=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(4):
            leaves = how if world.rank == 1 and step == 2 else ""
            if leaves == "returns":
                return
            if leaves == "raises in the loop":
                broken()
            if leaves == "raises in forward":
                model[1].register_forward_hook(broken)
            output = model(torch.ones(3, 4))
            if leaves == "raises in backward":
                output.register_hook(broken)
            if leaves == "raises as a gradient is there":
                model[0].weight.register_post_accumulate_grad_hook(broken)
            if leaves == "raises in step":
                optimizer.register_step_pre_hook(broken)
            output.sum().backward()
            optimizer.step()
    finally:
        pl.shutdown()


def told_of_one_that_leaves(how: str) -> tuple[str, float]:
    """What a rank raises, and when."""
    try:
        train_until_one_leaves(how)
    except Broken as error:
        return str(error), error.at
    except CommunicationError as error:
        return str(error), time.monotonic()
    return "", time.monotonic()


HOOKS = ("forward", "backward", "step")


@pytest.mark.parametrize("transport", ["auto", full("tcp")])
@pytest.mark.parametrize(
    "how",
    ["returns", "raises in the loop", *(f"raises in {hook}" for hook in HOOKS), "raises as a gradient is there"],
)
def test_who_waits_for_a_rank_that_leaves_the_job_is_told_why_at_once(ranks, transport: str, how: str) -> None:
    (told, at), (_, left) = ranks(2, told_of_one_that_leaves, how, transport=transport)
    fails = how != "returns"
    cause = "Broken: a broken batch" if fails else "pl.shutdown() while models were parallel: pl.release them first"
    assert told.startswith(f"rank 1 gave up: {cause}")
    # Some hundredths of a second, on a machine that is not busy.
    assert at - left < 3


def told_of_one_that_resets(strategy: pl.Strategy, first: int) -> tuple[str, bool]:
    """What a rank raises where rank 1 fails between two hooks of the engine's and resets; whether all then go on."""
    world = pl.init()
    torch.manual_seed(0)
    model = pl.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told, hook = "", None
    for step in range(first + 2):
        if world.rank == 1 and step == first:
            hook = model[0].register_forward_hook(broken)
        try:
            model(torch.ones(3, 4)).sum().backward()
        except (Broken, CommunicationError) as error:
            told = str(error)
            pl.reset(model)
            if hook is not None:
                hook.remove()
            continue
        optimizer.step()
        optimizer.zero_grad()
    weights = [parameter.sum().item() for parameter in pl.release(model).parameters()]
    return told, all(each == weights for each in pl.all_gather_json(weights))


@pytest.mark.parametrize("transport", ["auto", full("tcp")])
@pytest.mark.parametrize(
    ("strategy", "first"),
    diagonal(
        {
            "zero 0": pl.Strategy(zero=0),
            "zero 2": pl.Strategy(zero=2),
            "zero 3": pl.Strategy(zero=3),
        },
        {"the first step": 0, "a later one": 2},
    ),
)
def test_who_waits_for_a_rank_that_resets_is_told_why(ranks, transport: str, strategy: pl.Strategy, first: int) -> None:
    for rank, (told, agree) in enumerate(ranks(3, told_of_one_that_resets, strategy, first, transport=transport)):
        assert agree
        # In the first step they exchange control messages.
        of_another = told.startswith("rank 1 gave up: Broken: a broken batch") or (
            "; rank 1: pl.reset, after Broken: a broken batch. Every rank must" in told
        )
        assert told == "a broken batch" if rank == 1 else of_another, told


def leave_with_a_collective_under_way() -> str:
    """What rank 1 is told, which waits for rank 0 in another collective than the one that rank 0 leaves in."""
    world = pl.init()
    begun, awaited = open_transport(world), open_transport(world)
    buffers = [transport.allocate(64, torch.float32) for transport in (begun, awaited)]
    if world.rank == 0:
        ThreadStream("test").submit(lambda: begun.run("all_reduce", buffers[0], "bucket 7"), "bucket 7")
        pl.shutdown()
        return ""
    with pytest.raises(CommunicationError) as caught:
        awaited.run("all_reduce", buffers[1], "bucket 8")
    pl.shutdown()
    return str(caught.value)


def test_who_leaves_waits_with_what_is_under_way_for_no_one_who_waits_for_it(ranks) -> None:
    _, told = ranks(2, leave_with_a_collective_under_way)
    assert "bucket 7" in told and "bucket 8" in told and ", which waits for it in all_reduce" in told


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


@pytest.mark.parametrize(("transport", "n"), [("auto", 2), full("tcp", 3)])
def test_an_exception_that_ends_one_rank_stands_last_on_the_others_and_nothing_hangs(tmp_path, transport, n) -> None:
    before = set(os.listdir("/dev/shm"))
    program = tmp_path / "program.py"
    program.write_text(UNCAUGHT)
    began = time.monotonic()
    ranks = []
    for rank in range(n):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(n),
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
    assert told == [lost, cause, lost][:n]
    assert not new_in_shared_memory(before)
