from __future__ import annotations

import pytest

from paceline.core.collectives.algorithms import find_algorithm
from paceline.core.collectives.rounds import alpha_beta_seconds
from paceline.report.link import COUNTED, fitted_link, rounds_and_share
from paceline.report.meetings import groups_of
from paceline.report.steps import Step
from tests.report.events import collective, compute, recording


def steps(*collectives: tuple[str, int, float], late: float = 0.0) -> list[Step]:
    """One step of two ranks, the second of which comes later, with collectives of a kind and size that take so long."""
    events = []
    for rank in (0, 1):
        now = rank * late
        for number, (kind, size, seconds) in enumerate(collectives):
            start = float(number) + now
            events.append(collective(rank, start, number + late + seconds, kind=kind, bytes=size, target=str(number)))
        events.append(compute("update", rank, 90, 91))
    return [Step(recording(events), groups_of(None, 2))]


def by_ring(kind: str, size: int) -> tuple[str, int, float]:
    """A collective over a link of 0.1 s a round and 1000 bytes a second."""
    return kind, size, alpha_beta_seconds(find_algorithm(f"{kind}/ring"), 2, size, bandwidth=1000.0, latency=0.1)


def test_a_ring_is_what_the_textbook_says() -> None:
    assert rounds_and_share("all_reduce", 10) == (18, pytest.approx(1.8))
    assert rounds_and_share("all_reduce", 100) == (198, pytest.approx(1.98))
    assert rounds_and_share("all_gather", 10) == rounds_and_share("reduce_scatter", 10) == (9, pytest.approx(0.9))
    assert rounds_and_share("reduce", 10) == (1, pytest.approx(9))


@pytest.mark.parametrize("kind", sorted(COUNTED))
def test_no_rank_has_more_to_do_than_the_first(kind: str) -> None:
    way = {"reduce": "server", "broadcast": "server", "barrier": "doubling"}.get(kind, "ring")
    for ranks in range(2, 9):
        rounds, share = rounds_and_share(kind, ranks)
        seconds = alpha_beta_seconds(find_algorithm(f"{kind}/{way}"), ranks, 6 * ranks, bandwidth=2.0, latency=0.5)
        size = 1 if kind == "barrier" else 6 * ranks
        assert 0.5 * rounds + share * size / 2.0 == pytest.approx(seconds)


@pytest.mark.parametrize("late", [0.0, 0.3])
def test_the_link_that_collectives_went_over_is_found(late: float) -> None:
    done = [by_ring("all_reduce", 100), by_ring("all_gather", 200), by_ring("reduce_scatter", 400)]
    link = fitted_link(steps(*done, late=late))
    assert link is not None
    assert (link.latency, link.bandwidth) == (pytest.approx(0.1), pytest.approx(1000.0))
    assert link.worst_miss == pytest.approx(0, abs=1e-9) and link.samples == 3
    assert [link.seconds(kind, 2, size) for kind, size, _ in done] == pytest.approx([each for *_, each in done])


def test_through_two_points_a_line_always_goes() -> None:
    done = [by_ring("all_reduce", 100), by_ring("all_reduce", 200), by_ring("all_reduce", 400)]
    found = [fitted_link(steps(*done[:count])) for count in (2, 3)]
    assert [link is not None and link.is_exact for link in found] == [True, False]


def test_what_it_misses_is_said() -> None:
    link = fitted_link(steps(("all_gather", 200, 0.2), ("all_gather", 400, 0.2), ("all_gather", 800, 0.8)))
    assert link is not None and 0.1 < link.worst_miss < 1


@pytest.mark.parametrize(
    "done",
    [
        [],
        [("all_gather", 200, 0.2)],
        [("all_gather", 200, 0.2), ("reduce_scatter", 200, 0.4)],
    ],
)
def test_nothing_is_made_up_where_sizes_tell_nothing(done: list[tuple[str, int, float]]) -> None:
    assert fitted_link(steps(*done)) is None


def test_bytes_are_free_where_larger_collectives_take_no_longer() -> None:
    link = fitted_link(steps(("all_gather", 200, 0.3), ("all_gather", 400, 0.2), ("all_gather", 800, 0.2)))
    assert link is not None and not link.has_limit
    assert link.seconds("all_gather", 2, 800) == link.seconds("all_gather", 2, 8) == pytest.approx(link.latency)
    assert link.in_words == "more than can be told"
