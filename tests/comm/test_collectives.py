from __future__ import annotations

import time

import pytest
import torch

import paceline as pl
from paceline import comm
from paceline.comm.collectives import SUMMED
from paceline.comm.transport import CommunicationError
from paceline.core.collectives.algorithms import ALGORITHMS, REDUCTIONS, ROOTED
from paceline.core.errors import UserError
from tests.comm.reference import expected, values


def use_all() -> list[object]:
    rank = pl.init().rank
    seen: list[object] = []
    for name in [name for name in ALGORITHMS if name != "barrier"]:
        for algorithm in ("auto", *ALGORITHMS[name]):
            tensor = torch.arange(6.0).view(2, 3) + 10 * rank
            getattr(comm, name)(tensor, algorithm)
            seen.append((name, algorithm, tensor.flatten().tolist()))
    comm.barrier()
    seen.append(str(comm.why("all_reduce", 25 << 20)))
    return seen


WHOLE = [float(x) for x in range(6)]
SUM = [30 + 3 * x for x in WHOLE]
GATHERED = [0.0, 1.0, 12.0, 13.0, 24.0, 25.0]
ROOT = {"broadcast": WHOLE, "reduce": SUM, "all_reduce": SUM, "gather": GATHERED, "all_gather": GATHERED}
LAST = {"broadcast": WHOLE, "all_reduce": SUM, "all_gather": GATHERED, "all_to_all": [4.0, 5.0, 14.0, 15.0, 24.0, 25.0]}
OWN = {"scatter": WHOLE[4:], "reduce_scatter": SUM[4:]}


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_collective_by_every_algorithm(ranks, transport) -> None:
    first, *_, last = ranks(3, use_all, transport=transport)
    for name, algorithm, left in first[:-1]:
        assert left == ROOT.get(name, left), (name, algorithm)
    for name, algorithm, left in last[:-1]:
        assert left == LAST.get(name, left), (name, algorithm)
        assert left[4:] == OWN.get(name, left[4:]), (name, algorithm)
    assert "all_reduce of 26,214,400 bytes, 3 ranks on" in first[-1]
    assert "us a message" in first[-1] and first[-1].count("<- chosen") == 1
    assert first[-1] == last[-1], "every rank chooses alike"


def from_every_root() -> list[str]:
    world = pl.init()
    inputs = [values(peer, 7, torch.float64) for peer in range(world.world_size)]
    wrong = []
    for name in ROOTED:
        for algorithm in ("auto", *ALGORITHMS[name]):
            for root in range(world.world_size):
                tensor = inputs[world.rank].clone()
                getattr(comm, name)(tensor, algorithm, root=root)
                exact, where = expected(name, world.rank, inputs, root=root)
                if not torch.allclose(tensor[where], exact[where], rtol=1e-14):
                    wrong.append(f"{name}/{algorithm} of root {root}")
    return wrong


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_any_rank_can_be_the_root(ranks, transport) -> None:
    assert ranks(3, from_every_root, transport=transport) == [[]] * 3


def misuse() -> list[str]:
    pl.init()
    said = []
    for call in (
        lambda: comm.all_to_all(torch.zeros(5)),
        lambda: comm.all_reduce(torch.zeros(4, 4).t()[1:]),
        lambda: comm.all_reduce(torch.zeros(4), "star"),
        lambda: comm.all_reduce(torch.zeros(4, device="meta")),
        lambda: comm.broadcast(torch.zeros(4), root=2),
        lambda: comm.reduce(torch.zeros(4, dtype=torch.bool)),
        lambda: comm.reduce_scatter(torch.zeros(4, dtype=torch.int64), scale=0.5),
    ):
        with pytest.raises(UserError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_misuse_is_answered_with_what_to_do(ranks) -> None:
    cut, strided, unknown, device, root, flags, half = ranks(2, misuse)[0]
    assert "2 ranks cannot cut 5 elements" in cut and "pad" in cut
    assert "contiguous" in strided
    assert "expected one of direct, ring" in unknown
    assert "on the CPU, got one on meta" in device
    assert root == "broadcast: expected a root from 0 to 1, got 2"
    assert flags.startswith("reduce: torch.bool cannot be added up; pass a copy in a dtype that can")
    assert half == "reduce_scatter: scale=0.5 does not go with torch.int64; leave it out and divide the sum"


def of_other_dtypes() -> list[str]:
    """Collectives of numbers that are exact in every dtype, and moved without arithmetic where it has none."""
    world = pl.init()
    exact = [torch.arange(6, dtype=torch.float64) + 10 * peer for peer in range(world.world_size)]
    floats = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    wrong = []
    for dtype in [*sorted(SUMMED - floats, key=str), torch.bool, torch.float8_e5m2]:
        # As bytes, what has no arithmetic.
        shown = dtype if dtype in SUMMED else torch.uint8
        inputs = [each % 2 if dtype == torch.bool else each for each in exact]
        for name in (name for name in ALGORITHMS if name != "barrier" and (dtype in SUMMED or name not in REDUCTIONS)):
            for algorithm in ("auto", *ALGORITHMS[name]):
                tensor = inputs[world.rank].to(shown).view(dtype)
                getattr(comm, name)(tensor, algorithm)
                values, where = expected(name, world.rank, inputs)
                if not torch.equal(tensor.view(shown)[where].to(torch.complex128), values[where].to(torch.complex128)):
                    wrong.append(f"{name}/{algorithm} of {dtype}")
    return wrong


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_integers_and_complex_numbers_are_added_up_and_any_dtype_is_moved(ranks, transport) -> None:
    assert ranks(3, of_other_dtypes, transport=transport) == [[]] * 3


def call_something_else(mine: str, theirs: str) -> tuple[str, float]:
    """Rank 1 calls something else with tensors of its own; after calls that all made alike."""
    world = pl.init()
    comm.all_reduce(torch.ones(10))
    pl.barrier()
    calls = {
        "fp32": lambda: comm.all_reduce(torch.ones(10)),
        "fp64": lambda: comm.all_reduce(torch.ones(10, dtype=torch.float64)),
        "large": lambda: comm.all_gather(torch.ones(2 << 20), "direct"),
        "larger": lambda: comm.all_gather(torch.ones(3 << 20), "direct"),
        "small": lambda: comm.all_gather(torch.ones(10), "direct"),
        "half": lambda: comm.all_reduce(torch.ones(10), scale=0.5),
        "empty": lambda: comm.all_reduce(torch.ones(0)),
        "gather nothing": lambda: comm.all_gather(torch.ones(0), "direct"),
        "broadcast nothing": lambda: comm.broadcast(torch.ones(0)),
        "root 0": lambda: comm.broadcast(torch.ones(10)),
        "root 1": lambda: comm.broadcast(torch.ones(10), root=1),
    }
    began = time.monotonic()
    try:
        calls[theirs if world.rank == 1 else mine]()
    except CommunicationError as error:
        return str(error), time.monotonic() - began
    return "no error", 0.0


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("fp32", "fp64"),
        ("large", "small"),
        ("large", "larger"),
        ("root 0", "root 1"),
        ("fp32", "half"),
        ("fp32", "empty"),
        ("empty", "fp32"),
        ("empty", "gather nothing"),
        ("large", "gather nothing"),
        ("root 0", "broadcast nothing"),
        ("broadcast nothing", "root 0"),
    ],
)
def test_calls_that_differ_are_named_before_the_time_limit(ranks, transport, mine, theirs) -> None:
    results = ranks(2, call_something_else, mine, theirs, transport=transport)
    assert all("ranks disagree" in message or "is gone" in message for message, _ in results), results
    assert any("ranks disagree" in message for message, _ in results)
    assert max(seconds for _, seconds in results) < 20
    # Their connection, which is of no more use, would be the next case's too.
    ranks(2, pl.shutdown, transport=transport)


def first_call(dtype: torch.dtype) -> list[float]:
    tensor = torch.full((4,), 1.0 + pl.init().rank, dtype=dtype)
    comm.all_reduce(tensor)
    return tensor.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_measuring_for_the_first_call_leaves_its_tensor_alone(ranks, dtype) -> None:
    assert ranks(3, first_call, dtype) == [[6.0] * 4] * 3
