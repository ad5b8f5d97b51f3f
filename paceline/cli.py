"""The command line. Commands import what they need, so that help comes at once."""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Annotated

import tyro

from paceline.errors import UserError
from paceline.train.worker import run_worker

HELP = """\
paceline trains PyTorch models data-parallel and shows where the time went.

usage: paceline COMMAND [options]

commands:
  train    train a Transformer on text: one process, --workers N, torchrun or Slurm
  sample   let a trained model continue a prompt
  plan     what a model costs on N devices: memory and bytes sent, at each stage of ZeRO
  verify   compare N ranks with one process, for your own model and every stage of ZeRO
  trace    write one step of a run as a timeline for ui.perfetto.dev
  bench    time strategies, collectives and slow links beside their peers
  version  print the version
  help     print this

start with:
  paceline train --workers 2                      two minutes on two cores, no download
  paceline sample runs/latest --prompt "def "
  paceline train --help                           every setting and its default
"""


@dataclass(frozen=True)
class SampleArguments:
    """Lets the model of a finished, interrupted or running run continue a prompt."""

    run: Annotated[str, tyro.conf.Positional]
    """The run's folder, such as runs/latest."""
    prompt: str = "def "
    """What the text begins with; '' for the beginning of a document."""
    tokens: int = 200
    """Most tokens to add."""
    temperature: float = 0.8
    """0 takes the likeliest token each time, 1 draws as the model predicts."""
    top_k: int = 40
    """Draw from so many likeliest tokens; 0 for all."""
    seed: int | None = None
    """Makes the text repeatable."""


@dataclass(frozen=True)
class TraceArguments:
    """Writes the events of one step as a trace, one track per rank and stream."""

    run: Annotated[str, tyro.conf.Positional]
    """The run's folder, such as runs/latest."""
    step: int | None = None
    """Optimizer step; by default the latest one whose events were written down."""
    out: str | None = None
    """The file to write: .png or .svg for a picture, else a trace; by default trace.json in the run's folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: Without the program's name; those of this process by default.

    Returns:
        The exit status: 0, 2 for a user's mistake, 130 after Ctrl-C, 141 when nobody reads the output any more.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = run_worker(lambda: _run(given))
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "sample": _sample,
        "plan": _plan,
        "verify": _verify,
        "trace": _trace,
        "bench": _bench,
        "version": _version,
        "help": _help,
    }
    name, rest = (arguments[0], arguments[1:]) if arguments else ("help", [])
    name = {"-h": "help", "--help": "help", "--version": "version", "-V": "version"}.get(name, name)
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(commands)}"
        raise UserError(f"there is no command {name!r}; {hint}")
    with _ended_in_order():
        return commands[name](rest)


def _train(arguments: list[str]) -> int:
    from paceline.train.command_line import parse_train_arguments
    from paceline.train.launch import job_in_environment, launch
    from paceline.train.run_folder import choose_run_folder
    from paceline.train.yaml_file import to_yaml

    wants_config = "--print-config" in arguments
    config = parse_train_arguments([item for item in arguments if item != "--print-config"])
    if wants_config:
        print(to_yaml(config), end="")
        return 0
    job = job_in_environment(os.environ)
    if config.workers is not None and config.workers > 1 and job in (None, 1):
        choose_run_folder(config.folder, config.model.preset)
        return launch([*_this_program(), "train", *arguments], config.workers, config.threads)
    from paceline.train.loop import train

    return train(config)


def _plan(arguments: list[str]) -> int:
    from paceline.plan.cli import main as plan

    return plan(arguments)


def _verify(arguments: list[str]) -> int:
    from paceline.verify.cli import main as verify

    return verify(arguments)


def _sample(arguments: list[str]) -> int:
    options = tyro.cli(
        SampleArguments,
        prog="paceline sample",
        args=arguments,
        use_underscores=False,
        description=SampleArguments.__doc__,
    )
    from paceline.train.sample import sample_run

    pieces = sample_run(options.run, options.prompt, options.tokens, options.temperature, options.top_k, options.seed)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _trace(arguments: list[str]) -> int:
    options = tyro.cli(TraceArguments, prog="paceline trace", args=arguments)
    from paceline.trace import write_trace
    from paceline.train.run_folder import EVENTS, find_run

    run = find_run(options.run, EVENTS)
    out = Path(options.out) if options.out is not None else run / "trace.json"
    write_trace(run, options.step, out)
    is_picture = out.suffix in (".png", ".svg")
    print(f"{out}" if is_picture else f"{out}: open it at https://ui.perfetto.dev or in chrome://tracing")
    return 0


def _bench(arguments: list[str]) -> int:
    from paceline.bench.cli import main as bench

    return bench(arguments)


def _version(arguments: list[str]) -> int:
    print(f"paceline {version('paceline')}")
    return 0


def _help(arguments: list[str]) -> int:
    print(HELP, end="")
    return 0


def _this_program() -> list[str]:
    """How to start this program again, with the module search path that it has now."""
    run_as_module = Path(sys.argv[0]).name == "__main__.py"
    return [sys.executable, *([] if run_as_module else ["-P"]), "-m", "paceline"]


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Lets a request to end this process close what is open: ranks, files, networks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
