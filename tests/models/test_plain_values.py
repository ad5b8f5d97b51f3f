"""Copies of plain values share nothing with them, tell whether they have changed, and put objects back."""

from __future__ import annotations

import datetime
import io
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.models.plain_values import Copies, is_alike


class Meter:
    def __init__(self) -> None:
        self.calls, self.seen = 0, [1]


def change(value: Any) -> None:
    """Changes what lies deepest."""
    if isinstance(value, dict):
        key = next(iter(value))
        value[key] = value[key] + 1 if isinstance(value[key], int) else change(value[key]) or value[key]
    elif isinstance(value, (list, deque)) and isinstance(value[0], int):
        value[0] += 1
    elif isinstance(value, (list, deque, tuple)):
        change(value[0])
    elif isinstance(value, set):
        value.add(len(value))
    else:
        value += 1


VALUES = {
    "list": [1],
    "list in a list": [[1]],
    "tuple of a list": ([1],),
    "dictionary in a dictionary": {"a": {"b": 1}},
    "list in an ordered dictionary": OrderedDict(a=[1]),
    "default dictionary": defaultdict(int, a=1),
    "counter": Counter(a=1),
    "deque": deque([1]),
    "set": {7},
    "array": np.zeros(2),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_copy_stays_as_it_was_and_tells_a_change(name: str) -> None:
    value = VALUES[name]
    before = Copies().of(value)
    assert type(before) is type(value) and is_alike(value, before)
    change(value)
    assert not is_alike(value, before) and is_alike(before, Copies().of(before))


@pytest.mark.parametrize("make", [Meter, lambda: SimpleNamespace(calls=0, seen=[1])])
def test_objects_stay_themselves_and_are_put_back(make: Any) -> None:
    meter, copies = make(), Copies()
    assert copies.of([meter, meter])[1] is meter
    meter.calls, meter.seen[0], meter.late = 5, 6, "new"
    undo = copies.put()
    assert meter.calls == 0 and meter.seen == [1] and not hasattr(meter, "late")
    meter.seen.append(8)
    undo()
    assert meter.calls == 5 and meter.seen == [6] and meter.late == "new"
    copies.put()
    assert meter.seen == [1], "what ran in between has not changed the copy"


def test_objects_are_put_back_whatever_else_they_hold() -> None:
    held = SimpleNamespace(device=torch.device("cpu"), make=Meter, calls=0, meter=Meter(), deep=SimpleNamespace())
    held.deep.deeper = Meter()
    copies = Copies()
    copies.of(held)
    for each in (held, held.meter, held.deep.deeper):
        each.calls = 7
    held.meter.seen.append(2)
    undo = copies.put()
    assert held.calls == 0 == held.meter.calls and held.meter.seen == [1] and held.device.type == "cpu"
    assert held.deep.deeper.calls == 7, "the third inside each other"
    undo()
    assert held.calls == 7 == held.meter.calls and held.meter.seen == [1, 2]


def test_tensors_of_objects_are_put_back() -> None:
    graph, trained = torch.ones(1, requires_grad=True) * 2, torch.ones(1, requires_grad=True)
    held = SimpleNamespace(counts=torch.zeros(2), graph=graph, trained=trained)
    copies, counts = Copies(), held.counts
    copies.of(held)
    held.counts.add_(1)
    held.last = torch.ones(2)
    undo = copies.put()
    assert torch.equal(held.counts, torch.zeros(2)) and not hasattr(held, "last")
    assert held.graph is graph and held.trained is trained
    held.counts.add_(5)
    undo()
    assert held.counts is counts and torch.equal(counts, torch.ones(2)) and torch.equal(held.last, torch.ones(2))


LOCKED, FILED = SimpleNamespace(lock=threading.Lock(), calls=0), SimpleNamespace(file=io.StringIO(), calls=0)


@pytest.mark.parametrize(
    "value", [nn.Linear(2, 2), torch.ones(2), object(), len, Meter, LOCKED, FILED, datetime.date(2000, 1, 1)]
)
def test_what_threads_share_and_what_is_no_users_own_is_left_alone(value: Any) -> None:
    copies = Copies()
    assert copies.of(value) is value and not copies._objects


def test_one_value_in_two_places_has_one_copy() -> None:
    shared = [1]
    first, second = Copies().of((shared, {"a": shared}))
    assert first is second["a"] and first is not shared
