"""The state machine of a training loop: every sequence of up to six calls, against a model of it kept as a history."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest

from paceline.core.errors import EngineError
from paceline.core.step_state import StepState

LENGTH = 6


def forward(state: StepState) -> str:
    return state.begin_forward()


def backward(state: StepState) -> None:
    state.begin_backward()


def deferred(state: StepState) -> None:
    with state.deferring():
        state.begin_backward()


def end(state: StepState) -> None:
    state.end_backward()


def reduced(state: StepState) -> None:
    state.require_reduced("a look")


def update(state: StepState) -> None:
    # As an optimizer's hooks do it.
    state.require_reduced("optimizer.step()")
    state.end_update()


def reset(state: StepState) -> None:
    state.reset()


CALLS: dict[str, Callable[[StepState], str | None]] = {
    call.__name__: call for call in (forward, backward, deferred, end, reduced, update, reset)
}


class History:
    """What a state ought to be, from what was done in the step so far."""

    def __init__(self) -> None:
        self.step = self.generation = 0
        self.done: list[str] = []
        """Complete backwards (backward, deferred) and updates of the step."""
        self.under_way = ""
        self.last = ""
        """The last complete backward, over steps."""

    def refuses(self, call: str) -> bool:
        if self.under_way in ("backward", "deferred"):
            return call in ("forward", "backward", "deferred", "reduced", "update")
        return call in ("reduced", "update") and self.last == "deferred"

    def call(self, name: str) -> str | None:
        """What the call returns, if anything."""
        synchronised = [call for call in self.done if call != "update"][-1:] == ["backward"]
        over = "update" in self.done
        if name == "reset":
            self.done, self.under_way, self.last = [], "", ""
        elif name == "end":
            self.done.append(self.under_way)
            self.last, self.under_way = self.under_way, ""
        elif name == "update":
            self.done.append("update")
            self.generation += 1
            self.under_way = ""
        elif name == "forward":
            if self.under_way == "forward":
                return "within"
            if over:
                self._begin_step()
            self.under_way = name
            return "extra" if synchronised and not over else "planned"
        elif name in ("backward", "deferred"):
            if over or synchronised:
                self._begin_step()
            self.under_way = name
        return None

    def _begin_step(self) -> None:
        self.step += 1
        self.done = []

    @property
    def micro_batch(self) -> int:
        return len([call for call in self.done if call != "update"])


def calls_possible(state: StepState) -> Iterator[str]:
    """The engine ends no backward that did not begin."""
    return (name for name in CALLS if name != "end" or state.phase == "backward")


def walk(see: Callable[[tuple[str, ...], StepState, StepState, str | None], None], length: int = LENGTH) -> int:
    """Calls `see(calls, before, after, returned)` for every sequence; `returned` is "refused" where the last call is.

    Returns:
        How many sequences there are.
    """
    count = 0

    def go(calls: tuple[str, ...], state: StepState) -> None:
        nonlocal count
        for name in calls_possible(state):
            after = copy.copy(state)
            try:
                returned = CALLS[name](after)
            except EngineError:
                returned = "refused"
            count += 1
            see((*calls, name), state, after, returned)
            if len(calls) + 1 < length:
                go((*calls, name), after)

    go((), StepState())
    return count


def test_every_sequence_is_defined_or_refused_as_its_history_says() -> None:
    def see(calls: tuple[str, ...], before: StepState, after: StepState, returned: str | None) -> None:
        history, expected = History(), None
        for name in calls:
            expected = "refused" if history.refuses(name) else history.call(name)
        assert returned == expected, calls
        assert (after.step, after.micro_batch, after.generation) == (
            history.step,
            history.micro_batch,
            history.generation,
        ), calls
        gradients = {"": "none", "backward": "reduced", "deferred": "local"}[history.last]
        assert after.gradients == gradients, calls
        phase = {"": "idle", "deferred": "backward"}.get(history.under_way, history.under_way)
        assert after.phase == phase, calls

    assert walk(see) > 50_000


def test_a_call_that_is_refused_changes_nothing() -> None:
    def see(calls: tuple[str, ...], before: StepState, after: StepState, returned: str | None) -> None:
        if returned == "refused":
            assert vars(after) == vars(before), calls

    walk(see)


def test_steps_and_generations_never_go_back_and_grow_one_at_a_time() -> None:
    def see(calls: tuple[str, ...], before: StepState, after: StepState, returned: str | None) -> None:
        assert after.step - before.step in (0, 1), calls
        assert after.generation - before.generation == (calls[-1] == "update" and returned != "refused"), calls
        if after.step > before.step:
            assert calls[-1] in ("forward", "backward", "deferred") and after.micro_batch == 0, calls
        if "forward" not in calls and "update" not in calls:
            # Without an update, steps follow synchronised backwards.
            assert after.step <= calls.count("backward"), calls

    walk(see)


def test_what_begins_after_an_update_is_micro_batch_0_of_the_next_step() -> None:
    def see(calls: tuple[str, ...], before: StepState, after: StepState, returned: str | None) -> None:
        refused = before.phase == "backward" or before.gradients == "local"
        if calls[-2:-1] == ("update",) and not refused and calls[-1] in ("forward", "backward", "deferred"):
            assert (after.step, after.micro_batch) == (before.step + 1, 0), calls
            assert calls[-1] != "forward" or returned == "planned", calls

    walk(see)


def test_gradients_of_one_rank_alone_refuse_an_update_until_they_are_reduced_or_dropped() -> None:
    def see(calls: tuple[str, ...], before: StepState, after: StepState, returned: str | None) -> None:
        if before.gradients == "local" and calls[-1] in ("update", "reduced"):
            assert returned == "refused", calls
            dropped = copy.copy(before)
            dropped.drop_gradients()
            if dropped.phase != "backward":
                update(dropped)
        if before.gradients != "local" and before.phase != "backward":
            assert returned != "refused", calls

    walk(see)


def test_a_forward_after_a_synchronised_backward_is_extra_and_after_a_deferred_one_planned() -> None:
    def see(calls: tuple[str, ...], before: StepState, after: StepState, returned: str | None) -> None:
        if calls[-2:] == ("end", "forward"):
            assert returned == {"reduced": "extra", "local": "planned"}[before.gradients], calls
        if calls[-2:] == ("forward", "forward") and before.phase == "forward":
            assert returned == "within", calls

    walk(see)


def test_nothing_but_its_end_and_a_reset_follows_a_backward_under_way() -> None:
    def see(calls: tuple[str, ...], before: StepState, after: StepState, returned: str | None) -> None:
        if before.phase == "backward":
            assert (returned == "refused") == (calls[-1] not in ("end", "reset")), calls

    walk(see)


def test_after_a_reset_everything_but_the_end_of_a_backward_is_allowed() -> None:
    def see(calls: tuple[str, ...], before: StepState, after: StepState, returned: str | None) -> None:
        if calls[-1] != "reset":
            return
        assert (after.phase, after.gradients, after.micro_batch) == ("idle", "none", 0), calls
        assert (after.step, after.generation) == (before.step, before.generation), calls
        for name in set(CALLS) - {"end"}:
            again = copy.copy(after)
            assert CALLS[name](again) in (None, "planned"), (*calls, name)
            assert again.micro_batch == 0, (*calls, name)

    walk(see, LENGTH - 1)


def test_the_latest_complete_micro_batch_is_remembered() -> None:
    def see(calls: tuple[str, ...], before: StepState, after: StepState, returned: str | None) -> None:
        wanted = before.micro_batch if calls[-1] == "end" else before.last_micro_batch
        assert after.last_micro_batch == wanted, calls

    walk(see)


def test_a_backward_synchronises_outside_of_all_that_defers() -> None:
    def see(calls: tuple[str, ...], before: StepState, after: StepState, returned: str | None) -> None:
        if returned != "refused" and calls[-1] in ("backward", "deferred"):
            assert after.synchronises == (calls[-1] == "backward"), calls

    walk(see)
    state = StepState()
    with state.deferring():
        with state.deferring():
            pass
        state.begin_backward()
        assert not state.synchronises
        state.end_backward()
    with pytest.raises(ValueError, match="in the loop"), state.deferring():
        raise ValueError("in the loop")
    state.begin_backward()
    assert state.synchronises


def test_what_defers_may_end_after_a_reset() -> None:
    state = StepState()
    with state.deferring():
        state.begin_backward()
        state.reset()
    state.begin_backward()
    assert state.synchronises
    state.end_backward()
    with state.deferring():
        state.begin_backward()
        assert not state.synchronises


def test_a_backward_through_weights_that_have_changed_is_refused() -> None:
    state = StepState()
    state.begin_forward()
    generation = state.generation
    state.require_current(generation)
    update(state)
    with pytest.raises(EngineError, match="stepped between this forward and its backward"):
        state.require_current(generation)
    state.reset()
    with pytest.raises(EngineError, match="stepped between"):
        state.require_current(generation)
    generation = state.generation
    state.end_edit()
    with pytest.raises(EngineError, match=r"pl.full_parameters was entered.*between this forward and its backward"):
        state.require_current(generation)
    state.require_current(state.generation)


@pytest.mark.parametrize("call", ["forward", "backward", "deferred", "reduced", "update"])
def test_messages_say_what_to_do(call: str) -> None:
    state = StepState()
    state.begin_backward()
    with pytest.raises(EngineError, match=r"did not finish.*pl\.reset\(model\) on every rank"):
        CALLS[call](state)
    state.reset()
    deferred(state)
    state.end_backward()
    if call in ("reduced", "update"):
        with pytest.raises(EngineError, match=r"under no_sync.*outside no_sync"):
            CALLS[call](state)
    else:
        CALLS[call](state)
