from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.bench.cli import BENCHMARKS as ALL_BENCHMARKS
from paceline.cli import main
from paceline.completion import BENCHMARKS, SCRIPTS


@pytest.fixture
def scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    """The script of each shell."""
    for shell in SCRIPTS:
        assert main(["completion", shell]) == 0
        (tmp_path / shell).write_text(capsys.readouterr().out)
    return {shell: tmp_path / shell for shell in SCRIPTS}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_shell_understands_its_script(scripts: dict[str, Path], shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    done = subprocess.run([shell, "-n", str(scripts[shell])], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["tr"], ["train", "trace"]),
        (["bench", "str"], ["strategies"]),
        (["completion", "z"], ["zsh"]),
        (["faults", "r"], ["run"]),
        (["train", "--optim.sch"], ["--optim.schedule"]),
        (["train", "--optim.schedule", "co"], ["cosine", "constant"]),
        (["sample", "runs/latest", "--te"], ["--temperature"]),
        (["train", "--data.path", "no"], []),
    ],
)
def test_bash_completes_commands_flags_and_choices(
    scripts: dict[str, Path], words: list[str], found: list[str]
) -> None:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    line = " ".join(["paceline", *words])
    program = f'. {scripts["bash"]}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _paceline; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=20)
    assert done.stderr == ""
    assert sorted(done.stdout.split()) == sorted(found)


def test_every_benchmark_is_named() -> None:
    assert set(BENCHMARKS) == set(ALL_BENCHMARKS)


def test_another_shell_is_a_users_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "expected one of bash, zsh, fish, got tcsh" in capsys.readouterr().err
