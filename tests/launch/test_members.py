"""Who is which rank, and who takes a lost one's place: hand-made cases, and any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.members import MOST_FRUITLESS, Members


def stepping(wanted: int, least: int, fits=lambda ranks: True) -> Members:  # type: ignore[no-untyped-def]
    members = Members(wanted, least, fits)
    members.step(0)
    return members


def test_survivors_go_on_in_their_order() -> None:
    members = stepping(4, 2)
    members.end(1, lost=True)
    assert members.is_broken and members.silent == [0, 2, 3]
    assert members.form(coming=1) is None
    for number in (3, 0, 2):
        members.wait(number, epoch=0)
    assert members.form(coming=1) == [0, 2, 3] and members.epoch == 1
    assert not members.is_broken and members.form(coming=1) is None


def test_a_spare_takes_the_lost_ranks_place_and_comes_last() -> None:
    members = stepping(2, 2)
    members.wait(2, epoch=-1)
    assert not members.is_broken
    members.end(0, lost=True)
    members.wait(1, epoch=0)
    assert members.form(coming=0) == [1, 2] and members.waiting == []


def test_who_has_done_a_step_that_others_have_not_comes_first() -> None:
    members = stepping(4, 1)
    members.end(1, lost=True)
    for number, done in ((0, 6), (2, 7), (3, 7)):
        members.wait(number, epoch=0, done=done)
    assert members.form(coming=0) == [2, 3, 0]


def test_too_few_wait_for_those_that_are_coming_or_give_up() -> None:
    members = stepping(2, 2)
    members.end(0, lost=True)
    members.wait(1, epoch=0)
    assert members.form(coming=1) is None
    assert members.form(coming=0) == []


def test_only_as_many_as_can_share_the_work_are_ranks() -> None:
    members = stepping(4, 1, fits=lambda ranks: ranks % 2 == 0)
    members.end(3, lost=True)
    for number in (0, 1, 2):
        members.wait(number, epoch=0)
    assert members.form(coming=0) == [0, 1] and members.waiting == [2]
    # The one that was left over and a new one make it whole again.
    members.step(1)
    assert not members.should_grow()
    members.wait(4, epoch=-1)
    assert members.should_grow() and not members.should_grow()
    for number in (1, 0):
        members.wait(number, epoch=1)
    assert members.form(coming=0) == [0, 1, 2, 4]


def test_those_that_hold_something_of_their_own_stay() -> None:
    members = stepping(4, 1, fits=lambda ranks: ranks % 2 == 0)
    members.end(1, lost=True)
    for number, shard in ((0, "a"), (2, "a"), (3, "b")):
        members.wait(number, 0, shard)
    assert members.form(coming=0) == [0, 3] and members.waiting == [2]


def test_a_job_grows_only_after_it_has_done_a_step() -> None:
    members = stepping(2, 1)
    members.end(1, lost=True)
    members.wait(0, epoch=0)
    members.form(coming=1)
    members.wait(2, epoch=-1)
    assert not members.should_grow()
    members.step(0)
    assert not members.should_grow()
    members.step(1)
    assert members.should_grow()


def test_what_is_said_of_an_earlier_job_is_passed_over() -> None:
    members = stepping(2, 1)
    members.end(1, lost=True)
    members.wait(0, epoch=0)
    assert members.form(coming=0) == [0]
    members.wait(0, epoch=0)
    assert not members.is_broken
    # The first ranks ask when they have their place already.
    members.wait(0, epoch=-1)
    assert not members.is_broken


def test_losses_without_a_step_between_end_it() -> None:
    members = stepping(1, 1)
    for number in range(MOST_FRUITLESS):
        members.end(number, lost=True)
        members.wait(number + 1, epoch=-1)
        assert members.form(coming=0) == [number + 1]
    members.end(MOST_FRUITLESS, lost=True)
    members.wait(MOST_FRUITLESS + 1, epoch=-1)
    assert members.form(coming=0) == []


@pytest.mark.parametrize("last_is_lost", [False, True])
def test_the_work_is_over_when_ranks_have_ended_well(last_is_lost: bool) -> None:
    members = stepping(2, 1)
    members.end(0, lost=False)
    assert not members.is_over
    members.end(1, lost=last_is_lost)
    assert members.is_over and members.form(coming=1) is None


def test_one_that_lost_a_peer_which_was_done_does_not_train_on() -> None:
    members = stepping(2, 1)
    members.end(0, lost=False)
    members.wait(1, epoch=0)
    assert members.is_over and members.form(coming=1) is None


EVENTS = st.lists(st.tuples(st.sampled_from(["lose", "leave", "come", "step"]), st.integers(0, 9)), max_size=60)


@given(st.integers(1, 5), st.data(), EVENTS)
def test_whatever_happens_ranks_are_alive_and_as_many_as_they_may_be(
    wanted: int, data: st.DataObject, events: list[tuple[str, int]]
) -> None:
    least = data.draw(st.integers(1, wanted))
    members, alive, started = Members(wanted, least), set(range(wanted)), wanted
    for what, which in events:
        if what == "come":
            alive.add(started)
            members.wait(started, epoch=-1)
            started += 1
        elif what == "step":
            members.step(members.epoch)
        elif alive:
            number = sorted(alive)[which % len(alive)]
            if what == "lose":
                alive.remove(number)
                members.end(number, lost=True)
            elif number in members.ranks:
                members.wait(number, members.epoch)
        before, epoch = list(members.ranks), members.epoch
        formed = members.form(coming=0)
        if formed:
            assert members.epoch == epoch + 1
            assert least <= len(formed) <= wanted and len(set(formed)) == len(formed)
            assert set(formed) | set(members.waiting) == alive
            kept = [number for number in before if number in formed]
            assert formed[: len(kept)] == kept
        else:
            assert members.epoch == epoch and members.ranks == before
        if formed == []:
            return
