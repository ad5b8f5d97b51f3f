"""The command line. Commands import what they need, so that help comes at once."""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from paceline.core.errors import UserError
from paceline.launch.screen import show
from paceline.launch.worker import FORKS, run_worker

HELP = """\
paceline trains PyTorch models data-parallel and shows where the time went.

usage: paceline COMMAND [options]

commands:
  train       train a Transformer on text: one process, --workers N, torchrun or Slurm
  sample      let a trained model continue a prompt
  plan        what fits N devices, how long a step takes, which strategy to take; exact bytes
  check       prove a run's schedule for N devices: no deadlock, no race, no gradient lost
  verify      compare N ranks with one process, for your own model and every stage of ZeRO
  checkpoint  show, verify, export, import or prune checkpoints
  report      show a run as one page: where the time went, who came last, loss over steps
  watch       show a run as it goes on: step, loss, rates, time left, who is slow
  trace       write one step of a run as a timeline for ui.perfetto.dev
  bench       time strategies, collectives and slow links against their peers
  faults      kill, damage, fill and cut a small training, and prove that it goes on
  completion  print what lets bash, zsh or fish complete these commands
  version     print the version, as --version does
  help        print this

start with:
  paceline train --workers 2                      two minutes on two cores, no download
  paceline sample runs/latest --prompt "def "
  paceline train --help                           the settings that matter; --help-all has all
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: Without the program's name; those of this process by default.

    Returns:
        The exit status: 0, 2 for a user's mistake, 130 after Ctrl-C, 141 when nobody reads the output any more.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    _show_what_has_no_code()
    if FORKS in os.environ:
        from paceline.launch.forking import become_worker

        become_worker()
    try:
        status = run_worker(lambda: _run(given))
        sys.stdout.flush()
        return status
    except UserError as error:
        show(f"paceline: error: {error}", warning=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, which must not fail again.
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        mistake = _mistake_with_a_file(error, given)
        if mistake is None:
            raise
        show(f"paceline: error: {mistake}", warning=True)
        if error.filename is None:
            _drop_output()
        return 2


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _mistake_with_a_file(error: OSError, given: Sequence[str]) -> str | None:
    """What to tell of a file that the system refuses, if it is one that the user named or a full disk; else None."""
    if error.filename is None:
        # Writing to a file that is open, stdout above all, does not say to which.
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"what this command prints or writes finds no room: {error.strerror}; free some" if full else None
    path = Path(os.fsdecode(error.filename)).absolute()
    here = Path.cwd()
    for word in given:
        named = Path(word.partition("=")[2] if word.startswith("--") else word).expanduser().absolute()
        # Everything lies in / and much in ".", so these name but themselves.
        if path == named or (named in path.parents and named != here and named not in here.parents):
            return f"{error.filename}: {error.strerror}; choose another file or folder"
    return None


def _open_closed_streams() -> None:
    """Lets standard streams that came closed lead nowhere, so that no other file takes their place."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one.
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _show_what_has_no_code() -> None:
    """Lets a character that stdout's encoding lacks be shown escaped, as on stderr, and not end a training."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "sample": _sample,
        "plan": _plan,
        "check": _check,
        "verify": _verify,
        "checkpoint": _checkpoint,
        "report": _report,
        "watch": _watch,
        "trace": _trace,
        "bench": _bench,
        "faults": _faults,
        "completion": _completion,
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
    from paceline.comm.environment import job_in_environment
    from paceline.launch.imports import kept_for_good
    from paceline.launch.process import Command
    from paceline.launch.seat import Seat
    from paceline.launch.workers import launch
    from paceline.train.command_line import parse_train_arguments
    from paceline.train.run_folder import check_run_folder
    from paceline.train.yaml_file import to_yaml

    wants_config = "--print-config" in arguments
    config = parse_train_arguments([item for item in arguments if item != "--print-config"])
    if wants_config:
        print(to_yaml(config), end="")
        return 0
    if (seat := Seat.from_environment()) is not None:
        with kept_for_good():
            from paceline.train.successive_jobs import train_in_places

        return train_in_places(config, seat)
    job = job_in_environment(os.environ)
    # What the first checkpointed unit imports takes as long as torch itself.
    late = ("torch._dynamo",) if config.strategy.recompute != "none" else ()
    trains = "paceline.train.successive_jobs" if config.replaces else "paceline.train.loop"
    command = Command([*_this_program(), "train", *arguments], (trains, *late))
    if config.replaces:
        from paceline.train.replacing_job import start

        return start(config, command, job or 1)
    if config.workers is not None and config.workers > 1 and job in (None, 1):
        if config.resume is None:
            check_run_folder(config.folder)
        return launch(command, config.workers, config.threads)
    with kept_for_good():
        from paceline.train.loop import train

    return train(config)


def _plan(arguments: list[str]) -> int:
    from paceline.plan.cli import main as plan

    return plan(arguments)


def _check(arguments: list[str]) -> int:
    from paceline.plan.check_cli import main as check

    return check(arguments)


def _verify(arguments: list[str]) -> int:
    from paceline.verify.cli import main as verify

    return verify(arguments)


def _sample(arguments: list[str]) -> int:
    from paceline.train.sample_command import main as sample

    return sample(arguments)


def _checkpoint(arguments: list[str]) -> int:
    from paceline.checkpoint.command import main as checkpoint

    return checkpoint(arguments)


def _report(arguments: list[str]) -> int:
    from paceline.report.report_command import main as report

    return report(arguments)


def _watch(arguments: list[str]) -> int:
    from paceline.report.watch_command import main as watch

    return watch(arguments)


def _trace(arguments: list[str]) -> int:
    from paceline.report.trace_command import main as trace

    return trace(arguments)


def _bench(arguments: list[str]) -> int:
    from paceline.bench.cli import main as bench

    return bench(arguments)


def _faults(arguments: list[str]) -> int:
    from paceline.faults.command import main as faults

    return faults(arguments)


def _completion(arguments: list[str]) -> int:
    from paceline.completion import main as completion

    return completion(arguments)


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
