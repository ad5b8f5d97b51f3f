"""Looking at where a process is, at times at which that is hard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from paceline.comm.whereabouts import _words

BUSY = """
import faulthandler, gc, threading, time, weakref
from paceline.comm.whereabouts import Look, stacks

faulthandler.dump_traceback_later(100, exit=True)

class Dropped:
    pass

def waits_for_a_thread():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()

def deep(calls):
    if calls:
        deep(calls - 1)
    time.sleep(0.0005)

def goes_on():
    while True:
        deep(30)

for _ in range(4):
    threading.Thread(target=goes_on, daemon=True).start()
look = Look()
# So that the collector runs in whatever makes objects.
gc.set_threshold(5, 1, 1)
end = time.monotonic() + 2
while time.monotonic() < end:
    dropped = Dropped()
    dropped.itself = dropped
    weakref.finalize(dropped, waits_for_a_thread)
    del dropped
    look.again()
    stacks()
assert gc.isenabled()
gc.disable()
look.again()
assert not gc.isenabled()
print("went on")
"""


def test_a_model_that_is_collected_meanwhile_does_not_stop_the_process() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", BUSY], env=environment, capture_output=True, text=True, timeout=150)
    assert ran.stdout == "went on\n", ran.stderr


class Op(NamedTuple):
    words: str = "forward of blocks.4"
    has_ended: bool = False
    since: float | None = None


OWN = "/home/jobs/train.py"
MODULES = str(Path(torch.nn.modules.module.__file__))


@pytest.mark.parametrize(
    ("op", "has_ended", "files", "words"),
    [
        (Op(), False, [OWN, MODULES, OWN], "forward of blocks.4"),
        (Op(), True, [OWN], "the program's own code after forward of blocks.4"),
        # An exception ended it, and the loop went on.
        (Op(), False, [OWN], "the program's own code after forward of blocks.4"),
        (None, True, [OWN], "the program's own code before the first step"),
    ],
)
def test_an_op_is_said_to_run_while_it_is_on_the_stack(
    op: Op | None, has_ended: bool, files: list[str], words: str
) -> None:
    assert _words(op, has_ended, files) == words
