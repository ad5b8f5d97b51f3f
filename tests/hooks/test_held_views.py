"""Whether what was there before a unit's forward is told from what its forward makes."""

from __future__ import annotations

import gc
import threading
import time

import torch

from paceline.hooks.held_views import HeldViews


def test_what_was_there_is_left_behind_while_another_thread_collects() -> None:
    collects = threading.Event()

    def pause(phase: str, _: dict[str, int]) -> None:
        if threading.current_thread() is other and phase == "start":
            collects.set()
            time.sleep(0.2)

    before = [torch.ones(2) for _ in range(3)]
    other = threading.Thread(target=gc.collect, args=(0,))
    gc.disable()
    gc.callbacks.append(pause)
    try:
        other.start()
        assert collects.wait(5)
        HeldViews().begin("unit")
        young = {id(each) for each in gc.get_objects(0) + gc.get_objects(1)}
    finally:
        gc.callbacks.remove(pause)
        gc.enable()
        other.join()
    assert not young & {id(tensor) for tensor in before}
