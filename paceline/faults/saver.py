"""A program that saves again and again, each time in a process of its own that is there to be killed.

For every line that it reads it prints two of JSON: the stopped process that will save when it goes on, and, when that
has ended, by which signal, the step of the checkpoint that loads, and whether it holds what that step's should.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import paceline as pl
from paceline.checkpoint.folder import is_complete, step_folder


def main(folder: Path) -> None:
    """Saves steps 1 and 2 of a small model in `folder`, the second as often as it is asked to."""
    # A forked process has no other threads to compute with.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer = _parallel()
    states = {}
    for step in (1, 2):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states[step] = _values(model)
        if step == 1:
            pl.save(step_folder(folder, 1), model, optimizer, step=1)
    second = step_folder(folder, 2)
    for _ in sys.stdin:
        process = os.fork()
        if not process:
            os.kill(os.getpid(), signal.SIGSTOP)
            pl.save(second, model, optimizer, step=2)
            os._exit(0)
        os.waitpid(process, os.WUNTRACED)
        print(json.dumps({"process": process}), flush=True)
        _, status = os.waitpid(process, 0)
        other, its_optimizer = _parallel()
        step = pl.load(folder, other, its_optimizer).step
        right = _values(other) == states[step]
        pl.release(other)
        if is_complete(second):
            shutil.rmtree(second)
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        print(json.dumps({"signal": ended_by, "step": step, "right": right}), flush=True)


def _parallel() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = pl.parallelize(nn.Sequential(nn.Linear(16, 40), nn.Linear(40, 3)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _values(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().reshape(-1).tolist() for parameter in model.parameters()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
