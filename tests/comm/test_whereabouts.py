"""Looking at where a process is, at times at which that is hard."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.whereabouts import Look, _words, stacks
from tests.ranks import RankPool

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
end = time.monotonic() + 1
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


@pytest.mark.full
def test_a_model_that_is_collected_meanwhile_does_not_stop_the_process() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", BUSY], env=environment, capture_output=True, text=True, timeout=150)
    assert ran.stdout == "went on\n", ran.stderr


NATIVE = """
import ctypes, threading, time
from paceline.comm.whereabouts import Look

library = ctypes.CDLL(None)
called = 0

@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def call(nothing):
    global called
    called += 1

def make():
    while not over.is_set():
        threads = [ctypes.c_ulong() for _ in range(8)]
        for thread in threads:
            library.pthread_create(ctypes.byref(thread), None, call, None)
        for thread in threads:
            library.pthread_join(thread, None)

over = threading.Event()
makers = [threading.Thread(target=make)]
for maker in makers:
    maker.start()
look, end = Look(), time.monotonic() + 2
while time.monotonic() < end:
    assert "native" not in look.again()["words"]
over.set()
for maker in makers:
    maker.join()
assert called > 100, called
print("went on")
"""


@pytest.mark.full
def test_threads_that_native_code_makes_known_meanwhile_do_not_stop_the_process() -> None:
    # As autograd's, Gloo's and NCCL's do, whenever they call into Python or let go of a tensor that it knew.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", NATIVE], env=environment, capture_output=True, text=True, timeout=150)
    assert ran.stdout == "went on\n", (ran.returncode, ran.stderr)


def test_who_is_looked_at_is_the_thread_that_trains() -> None:
    looks: list[Look] = []
    over = threading.Event()

    def trains() -> None:
        looks.append(Look())
        over.wait()

    thread = threading.Thread(target=trains)
    thread.start()
    while not looks:
        time.sleep(0.001)
    (look,) = looks
    found: list[str] = []
    watch = threading.Thread(target=lambda: found.append(look.again()["at"]))
    watch.start()
    watch.join()
    assert found[0].endswith("in trains")
    over.set()
    thread.join()
    assert look.again()["at"] == "", "it has ended"


def trained_while_looked_at(seconds: float) -> int:
    over, interval, errors = threading.Event(), sys.getswitchinterval(), list[Exception]()
    # Threads take turns in the midst of everything.
    sys.setswitchinterval(1e-5)

    def look() -> None:
        try:
            look_on()
        except Exception as error:
            errors.append(error)

    def look_on() -> None:
        looks, count = Look(), 0
        while not over.is_set():
            looks.again()
            count += 1
            if count % 50 == 0:
                stacks()
            if count % 7 == 0:
                time.sleep(0.0005)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    end, models = time.monotonic() + seconds, 0
    while any(pl.all_gather_json(time.monotonic() < end, "whether to go on")):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
        model = pl.parallelize(nn.Sequential(*layers), pl.Strategy(zero=models % 4))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        pl.release(model)
        models += 1
    over.set()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors, errors
    return models


@pytest.mark.full
def test_training_goes_on_however_often_it_is_looked_at(ranks: RankPool) -> None:
    # Following frame objects of a thread that goes on ended one of the ranks within seconds.
    assert min(ranks(2, trained_while_looked_at, 8.0)) > 0


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
