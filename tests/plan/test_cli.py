from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest

from paceline.cli import main


def test_the_tables_have_a_row_for_each_stage_and_straight_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "tiny", "--devices", "4", "--shard", "2", "--micro-batches", "3"]) == 0
    head, held, sent, note = capsys.readouterr().out.split("\n\n")
    assert head.startswith("tiny: 873,600 parameters in 7 units, 4 devices, 3 micro-batches a step\nAssumed: bfloat16")
    assert "Not counted:\nactivations" in note
    for table, title in ((held, "Held by a device, MiB"), (sent, "Sent by a device in a step, MiB")):
        first, *lines = table.split("\n")
        assert first == title
        assert [line.split("  ")[0] for line in lines[1:]] == [*(f"zero {i}" for i in range(4)), "zero 3, groups of 2"]
        assert len({len(line) for line in lines}) == 1
        assert lines[0].endswith("total")


def test_json_has_the_same_numbers_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "tiny", "--devices", "4", "--precision", "float32"]
    assert main(arguments) == 0
    shown = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines() if line.startswith("zero")]
    assert main([*arguments, "--json", "-"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["model"], plan["parameters"], plan["units"]) == ("tiny", 873600, 7)
    assert (plan["devices"], plan["micro_batches"], plan["precision"]) == (4, 1, "float32")
    assert plan["assumed"].startswith("parameters, gradients and Adam's two states in float32")
    numbers = [row["memory"] for row in plan["rows"]] + [row["sent"] for row in plan["rows"]]
    assert [cells[1:] for cells in shown] == [[f"{size / 2**20:,.2f}" for size in row.values()] for row in numbers]


@pytest.mark.parametrize("more", [[], ["--hardware", "a100"]])
def test_precisions_go_by_their_short_names_too(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for precision in ("bf16", "bfloat16"):
        assert main(["plan", "--model", "nano", "--devices", "2", "--precision", precision, *more]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_hardware_without_a_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "nano", "--devices", "2", "--hardware", ""]) == 2
    assert "expected one of v100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "tiny", "--devices", "0"], "--devices: expected 1 or more, got 0"),
        (["--model", "tiny", "--devices", "2", "--micro-batches", "0"], "--micro-batches: expected 1 or more"),
        (["--model", "tiny", "--devices", "8", "--shard", "3"], "cannot form groups of 3"),
        (["--model", "tiny", "--devices", "8", "--shard", "-1"], "strategy.shard: expected 0 or more"),
        (["--model", "tinny", "--devices", "8"], "did you mean tiny?"),
        (
            ["--model", "tiny", "--devices", "8", "--json", "no/plan.json"],
            "--json no/plan.json: there is no folder no;",
        ),
        (["--model", "./my/tiny.py:build", "--devices", "8"], "a module's name, not its file: my.tiny:build"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert words in told.err and told.err.count("\n") == 1


def test_help_comes_without_torch() -> None:
    script = """
import sys
from paceline.cli import main
try:
    main(["plan", "--help"])
finally:
    assert "torch" not in sys.modules
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "usage: paceline plan" in told.stdout


@pytest.mark.full
def test_plan_and_check_do_without_what_takes_longer_to_import_than_to_work() -> None:
    script = """
import sys
from paceline.cli import main
main(["plan", "--model", "llama-70b", "--devices", "1024"])
main(["check", "--devices", "8"])
print({"sympy", "torch._inductor", "torch._dynamo"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.full
@pytest.mark.parametrize("module", ["numpy.linalg", "torch._dynamo.utils"])
def test_an_interrupt_amid_imports_ends_the_command(module: str) -> None:
    """Torch's own extension goes on without numpy where importing it fails, and falls over it later."""
    script = f"""
import os, signal, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == {module!r} and self in sys.meta_path:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from paceline.cli import main
sys.exit(main(["plan", "--model", "nano", "--devices", "2", "--hardware", "h100"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert (done.stdout, done.stderr) == ("", "")
