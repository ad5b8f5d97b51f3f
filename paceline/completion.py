"""`paceline completion SHELL`: a script that lets a shell complete commands, flags and choices."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence

from paceline.command_line.options import Option, options
from paceline.core.errors import UserError

HELP = """\
usage: paceline completion bash|zsh|fish

Prints a script that lets the shell complete commands, flags and choices:

    paceline completion bash > ~/.local/share/bash-completion/completions/paceline
    paceline completion zsh > ~/.zfunc/_paceline        # a folder of $fpath
    paceline completion fish > ~/.config/fish/completions/paceline.fish
"""
BENCHMARKS = (
    *("strategies", "gpu", "model", "trainer", "events", "overhead"),
    *("comm", "network", "plan", "checkpoint", "faults"),
)
"""Named here, too, as their own module imports torch."""

Flags = dict[str, tuple[str, ...]]
"""Flags of a command, each with the values that there are, if they can be named."""


def main(arguments: Sequence[str]) -> int:
    """Prints the script for a shell; returns the exit status.

    Raises:
        UserError: There is none for that shell.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if arguments[0] not in SCRIPTS or len(arguments) > 1:
        raise UserError(f"completion: expected one of {', '.join(SCRIPTS)}, got {' '.join(arguments)}")
    print(SCRIPTS[arguments[0]](commands()), end="")
    return 0


def commands() -> dict[str, Flags]:
    """Every command with its flags."""
    from paceline.checkpoint.arguments import CheckpointArguments
    from paceline.faults.arguments import FaultsArguments
    from paceline.plan.arguments import PlanArguments
    from paceline.plan.check_cli import CheckArguments
    from paceline.report.report_command import ReportArguments
    from paceline.report.trace_command import TraceArguments
    from paceline.report.watch_command import WatchArguments
    from paceline.train.config import TrainConfig
    from paceline.train.sample_command import SampleArguments
    from paceline.verify.arguments import VerifyArguments

    train = _flags(options(TrainConfig))
    return {
        "train": {**train, "--print-config": (), "--help-all": ()},
        "sample": _flags(options(SampleArguments)),
        "plan": _flags(options(PlanArguments)),
        "check": _flags(options(CheckArguments)) | train,
        "verify": _flags(options(VerifyArguments)),
        "checkpoint": _flags(options(CheckpointArguments)),
        "report": _flags(options(ReportArguments)),
        "watch": _flags(options(WatchArguments)),
        "trace": _flags(options(TraceArguments)),
        "bench": {"bench": BENCHMARKS},
        "faults": {"faults": ("list", "run"), **_flags(options(FaultsArguments))},
        "completion": {"completion": tuple(SCRIPTS)},
        "version": {},
        "help": {},
    }


def _flags(known: Iterable[Option]) -> Flags:
    found: Flags = {}
    for option in known:
        if not option.positional:
            found[option.flag] = option.choices
            if option.is_switch:
                found[option.off] = ()
    return {**found, "--help": ()}


def _cases(known: dict[str, Flags], line: str) -> str:
    """A shell's case for each word after which only some values make sense."""
    return "\n".join(
        f"    {shlex.quote(f'{command} {flag}' if flag != command else f'paceline {flag}')}) "
        + line.format(" ".join(map(shlex.quote, choices)))
        for command, flags in known.items()
        for flag, choices in flags.items()
        if choices
    )


def _flag_cases(known: dict[str, Flags], line: str) -> str:
    return "\n".join(
        f"    {command}) {line.format(' '.join(flag for flag in flags if flag.startswith('--')))}"
        for command, flags in known.items()
        if any(flag.startswith("--") for flag in flags)
    )


def _bash(known: dict[str, Flags]) -> str:
    return f"""\
# Completes paceline in bash.
_paceline() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  local command="${{COMP_WORDS[1]}}"
  if [ "$COMP_CWORD" -eq 2 ]; then before="$command"; command=paceline; fi
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(known)}" -- "$word"))
    return
  fi
  case "$command $before" in
{_cases(known, 'words="{}";;')}
  esac
  if [ "$COMP_CWORD" -eq 2 ]; then command="$before"; fi
  case "$word" in
    --*) case "$command" in
{_flag_cases(known, 'words="{}";;')}
    esac;;
  esac
  if [ -n "$words" ]; then COMPREPLY=($(compgen -W "$words" -- "$word")); fi
}}
complete -o default -F _paceline paceline
"""


def _zsh(known: dict[str, Flags]) -> str:
    return f"""\
#compdef paceline
# Completes paceline in zsh.
_paceline() {{
  local command="$words[2]" before="$words[CURRENT-1]"
  if (( CURRENT == 2 )); then
    compadd -- {" ".join(known)}
    return
  fi
  if (( CURRENT == 3 )); then command=paceline; fi
  case "$command $before" in
{_cases(known, "compadd -- {}; return;;")}
  esac
  if [[ "$words[CURRENT]" == --* ]]; then
    case "$words[2]" in
{_flag_cases(known, "compadd -- {}; return;;")}
    esac
  fi
  _files
}}
compdef _paceline paceline
"""


def _fish(known: dict[str, Flags]) -> str:
    lines = [
        "# Completes paceline in fish.",
        f"complete -c paceline -f -n __fish_use_subcommand -a {shlex.quote(' '.join(known))}",
    ]
    for command, flags in known.items():
        seen = f"-n '__fish_seen_subcommand_from {command}'"
        for flag, choices in flags.items():
            values = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            name = f" -l {flag[2:]}" if flag.startswith("--") else ""
            lines.append(f"complete -c paceline {seen}{name}{values}")
    return "\n".join(lines) + "\n"


SCRIPTS: dict[str, Callable[[dict[str, Flags]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
"""What writes the script of each shell."""
