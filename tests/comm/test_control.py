"""Control messages: ranks that exchange different ones are told so, also after a failure on some of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

import paceline as pl
from paceline import comm
from paceline.comm import control
from paceline.comm.connect import open_transport
from paceline.comm.control import new_generation
from paceline.comm.streams import ThreadStream
from paceline.comm.to_rank_0 import gather_to_rank_0
from paceline.comm.transport import CommunicationError
from paceline.core.collectives.rounds import Traffic
from tests.ranks import RankError


def exchange_different(values: list[object]) -> tuple[str, list[object]]:
    rank = pl.init().rank
    with pytest.raises(CommunicationError) as caught:
        if rank == 2:
            pl.barrier()
        else:
            pl.all_gather_json(values[rank], "order of units")
    return str(caught.value), pl.all_gather_json(rank)


# The second is longer than what is gathered before its length is known.
@pytest.mark.parametrize("values", [[1, 2], [1, "x" * 5000]])
def test_ranks_that_exchange_different_messages_are_told_both_and_can_go_on(ranks, values) -> None:
    for message, after in ranks(3, exchange_different, values):
        assert message.startswith(
            "ranks disagree on what to exchange; rank 0, 1: order of units; rank 2: pl.barrier. Every rank must"
        )
        assert "call pl.reset(model) on all of them" in message
        assert after == [0, 1, 2]


def reset_while_others_go_on(leftovers: int) -> tuple[list[str], list[object]]:
    """Rank 1 fails and resets; the others have so many messages of the failed step to exchange before they notice."""
    rank = pl.init().rank
    told = []
    if rank != 1:
        for number in range(leftovers):
            with pytest.raises(CommunicationError) as caught:
                pl.all_gather_json("a" * 2000 * number, f"message {number}")
            told.append(str(caught.value))
    new_generation()
    # Those who began the first reset alone and began it again are of the same generation as the others.
    new_generation()
    return told, pl.all_gather_json([rank, "b" * 2000 * rank])


def test_messages_of_a_failed_step_do_not_meet_those_of_the_reset(ranks) -> None:
    results = ranks(3, reset_while_others_go_on, 3)
    for rank, (told, after) in enumerate(results):
        assert after == [[peer, "b" * 2000 * peer] for peer in range(3)]
        assert len(told) == (0 if rank == 1 else 3)
        for number, message in enumerate(told):
            assert f"rank 0, 2: message {number}; rank 1: pl.reset" in message


def of_an_older_generation() -> tuple[str, list[object]]:
    """Rank 1 gave up a reset half-way, so that the others' messages are of a newer generation than its own."""
    rank = pl.init().rank
    if rank == 1:
        with pytest.raises(CommunicationError, match=r"rank 1: pl\.barrier"):
            pl.barrier()
    new_generation()
    return "", pl.all_gather_json(rank)


def test_a_reset_that_begins_beside_a_barrier_ends_in_the_same_generation(ranks) -> None:
    assert ranks(2, of_an_older_generation) == [("", [0, 1])] * 2


def reset_beside_a_collective() -> tuple[str, list[object]]:
    """Ranks 0 and 2 reset one model; rank 1 waits for them in a collective of another one."""
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(64, torch.float32)
    message = ""
    if world.rank == 1:
        with pytest.raises(CommunicationError) as caught:
            transport.run("all_reduce", buffer, "bucket 7")
        message = str(caught.value)
    new_generation()
    values = pl.all_gather_json(world.rank)
    transport.close()
    return message, values


def test_a_reset_ends_what_others_wait_in_for_another_model_and_then_waits_for_them(ranks) -> None:
    messages, values = zip(*ranks(3, reset_beside_a_collective), strict=True)
    assert messages[1].startswith("rank 0 gave up: rank 0 waits in pl.reset for rank 1, which waits for it in all_red")
    assert values == ([0, 1, 2],) * 3


def exchange_beside(meet: Callable[[], object]) -> tuple[str, list[object]]:
    """Rank 1 is in a barrier where the others meet in something that moves tensors."""
    with pytest.raises(CommunicationError) as caught:
        pl.barrier() if pl.init().rank == 1 else meet()
    return str(caught.value), pl.all_gather_json("after")


def broadcast_files() -> None:
    control.broadcast(torch.zeros(8), 0, "what ranks hold in memory")


def gather_gradients() -> None:
    gather_to_rank_0(torch.zeros(8), "what ranks hold in memory")


@pytest.mark.parametrize("meet", [broadcast_files, gather_gradients])
def test_tensors_that_rank_0_sends_or_gets_meet_no_other_message(ranks, meet) -> None:
    for told, after in ranks(3, exchange_beside, meet):
        assert "rank 0, 2: what ranks hold in memory; rank 1: pl.barrier" in told
        assert after == ["after"] * 3


def exchange_long_labels() -> tuple[list[object], str]:
    rank = pl.init().rank
    values = pl.all_gather_json(rank, "Größe der Schritte, ∑ \U0001f600" * 30)
    told = ""
    if rank:
        with pytest.raises(CommunicationError) as caught:
            pl.barrier()
        told = str(caught.value)
    new_generation(cause="" if rank else '"\\\n\x1b∑' * 300)
    return values, told


def test_labels_and_causes_of_any_length_and_characters_are_told(ranks) -> None:
    (values, _), (others, told) = ranks(2, exchange_long_labels)
    assert values == others == [0, 1]
    assert told.startswith('ranks disagree on what to exchange; rank 0: pl.reset, after "\\∑"\\∑')


def die_in_a_message() -> None:
    if pl.init().rank == 1:
        pl.barrier()
        os._exit(0)
    pl.barrier()
    with pytest.raises(CommunicationError, match=r"a rank is gone or did not answer in order of units\. "):
        pl.all_gather_json(1, "order of units")
    raise AssertionError("noticed")


def test_a_rank_that_dies_is_noticed_in_words(ranks) -> None:
    with pytest.raises(RankError, match="AssertionError: noticed"):
        ranks(2, die_in_a_message)


def barrier_beside(how: str) -> tuple[str, float]:
    """Rank 0 waits in a barrier, and rank 1 in a collective."""
    world = pl.init()
    transport, stream = open_transport(world), ThreadStream("reduce")
    buffer = transport.allocate(64, torch.float32)
    transport.run("all_reduce", buffer, "bucket 6")
    comm.all_reduce(torch.ones(4))
    began = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        if world.rank == 0:
            pl.barrier()
        elif how == "in a stream":
            stream.wait(stream.submit(lambda: transport.run("all_reduce", buffer, "bucket 7"), "bucket 7"))
        elif how == "by hand":
            transport.run("all_reduce", buffer, "bucket 7")
        else:
            comm.broadcast(torch.ones(4))
    seconds = time.monotonic() - began
    # What rank 0 left is met by rank 1's next message, whatever that is about.
    new_generation()
    assert pl.all_gather_json(world.rank) == [0, 1]
    stream.close()
    transport.close()
    return str(caught.value), seconds


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("in a stream", "all_reduce bucket 7 64 float32"),
        ("by hand", "all_reduce bucket 7 64 float32"),
        ("a tensor of its own", "broadcast/auto tensor 4 float32"),
    ],
)
def test_a_barrier_beside_a_collective_names_both_long_before_the_time_limit(ranks, how, where) -> None:
    for rank, (message, seconds) in enumerate(ranks(2, barrier_beside, how)):
        told = f"rank 0 waits in pl.barrier for rank 1, which waits for it in {where}. Every rank must make the same"
        assert message.startswith(told if rank == 0 else f"rank 0 gave up: {told}")
        assert seconds < 30


def barrier_before_a_collective_that_others_began() -> list[object]:
    """Rank 1's stream waits for rank 0, whose barrier is first; rank 1 is busy for longer than ranks wait to look."""
    world = pl.init()
    transport, stream = open_transport(world), ThreadStream("reduce")
    buffer = transport.allocate(64, torch.float32).fill_(1)

    def submit() -> None:
        pending.append(stream.submit(run, "bucket 7"))

    def run() -> Traffic:
        return transport.run("all_reduce", buffer, "bucket 7")

    pending: list[object] = []
    if world.rank == 1:
        submit()
        time.sleep(2.5)
    pl.barrier()
    if world.rank == 0:
        submit()
    stream.wait(pending[0])  # type: ignore[arg-type]
    stream.close()
    transport.close()
    return buffer[:2].tolist()


@pytest.mark.full
def test_a_rank_that_is_busy_beside_its_stream_is_waited_for(ranks) -> None:
    assert ranks(2, barrier_before_a_collective_that_others_began) == [[2.0, 2.0]] * 2


def barrier_twice() -> list[object]:
    """Rank 0 gave up a barrier, and meets rank 1 in the next one."""
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(64, torch.float32)
    with pytest.raises(CommunicationError):
        if world.rank == 0:
            pl.barrier()
        else:
            transport.run("all_reduce", buffer, "bucket 7")
    pl.barrier()
    values = pl.all_gather_json(world.rank)
    transport.close()
    return values


def test_a_barrier_that_was_given_up_is_the_next_one_of_this_rank(ranks) -> None:
    assert ranks(2, barrier_twice) == [[0, 1]] * 2


def tell_with_a_wrong_tag(value: str) -> tuple[str, list[object]]:
    """Rank 1's message is one that who made it could not sign."""
    rank = pl.init().rank
    forged = patch.object(control, "sign", lambda *_: bytes(32)) if rank == 1 else nullcontext()
    with forged, pytest.raises(CommunicationError) as caught:
        pl.all_gather_json(value, "plan")
    return str(caught.value), pl.all_gather_json(rank)


@pytest.mark.parametrize("value", ["x", "x" * 5000])
def test_a_message_that_the_job_did_not_sign_is_refused_on_every_rank(ranks, value: str) -> None:
    for message, after in ranks(2, tell_with_a_wrong_tag, value):
        assert message == "plan: what came for rank 1's message was not signed by this job"
        assert after == [0, 1]


def tell_too_much() -> tuple[str, list[object]]:
    rank = pl.init().rank
    with patch.object(control, "_MOST_BYTES", 10_000), pytest.raises(CommunicationError) as caught:
        pl.all_gather_json("x" * (20_000 if rank == 1 else 5), "plan")
    return str(caught.value), pl.all_gather_json(rank)


def test_a_message_that_is_too_long_is_refused_on_every_rank(ranks) -> None:
    for message, after in ranks(2, tell_too_much):
        assert message.startswith("plan: rank 1 tells 20") and "at most 10000 are a control message" in message
        assert after == [0, 1]
