"""Objects that threads go through while others add to them."""

from __future__ import annotations

import gc
import sys
import threading
import time

from paceline.comm.living import Living


class Item:
    """One that can be looked at weakly, and equals all others."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_they_come_in_the_order_they_were_added_while_they_live() -> None:
    living: Living[Item] = Living()
    items = [Item(n) for n in range(5)]
    for item in items:
        living.add(item)
    living.discard(items.pop(3))
    living.discard(Item(9))
    del items[0], item
    gc.collect()
    assert [each.number for each in living] == [1, 2, 4]
    numbers = []
    for each in living:
        del items[1:]  # dies while they are gone through
        numbers.append(each.number)
    assert numbers == [1]
    living.clear()
    assert not list(living)


def test_others_may_add_meanwhile() -> None:
    living: Living[Item] = Living()
    over, errors = threading.Event(), list[BaseException]()

    def look() -> None:
        try:
            while not over.is_set():
                assert all(isinstance(each, Item) for each in living)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        end, kept = time.monotonic() + 0.2, []
        while time.monotonic() < end:
            kept = [*kept[-50:], Item(0)]
            living.add(kept[-1])
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not errors, errors
    assert len(list(living)) <= len(kept) + 1
