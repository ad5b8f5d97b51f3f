"""A run is watched by its files: before it begins, while it goes on, when it is silent and when it has ended."""

from __future__ import annotations

import os
import pty
import signal
import sys
import termios
import time
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.report.watched import State, Watched
from tests.quick import full
from tests.report.events import figures, lines, write_run
from tests.train.processes import finished, program


def said(state: State) -> dict[str, str]:
    return dict(state.items)


def going_on(folder: Path, **more: float) -> Path:
    now = time.time()
    metrics = [figures(1, now - 9, seconds=2.0), figures(10, now, seconds=0.5, comm__exposed_fraction=0.25, **more)]
    return write_run(folder, metrics=metrics, config="steps: 110\n")


def end(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines([figures(110, time.time())]))
    (run / "model.safetensors").touch()


def test_it_says_how_the_run_is_and_reads_on(tmp_path: Path) -> None:
    run = going_on(tmp_path / "run", train__skipped_steps=2)
    watched = Watched(run)
    state = watched.look()
    known = said(state)
    assert (known["step"], known["tokens/s"], known["comm exposed"]) == ("10/110", "200", "25.0 %")
    assert known["left out"] == "2 steps" and "silent for" not in known and "has" not in known
    # 100 steps of half a second, less what has passed since.
    assert 45 < float(known["ETA"].split()[0]) <= 50
    assert state.share == pytest.approx(10 / 110)
    with (run / "metrics.jsonl").open("a") as file:
        row = lines([{"step": 10, "time": time.time(), "run/resumed_from": 10}, figures(20, time.time(), 0.25)])
        file.write(row[:-20])
        file.flush()
        assert said(watched.look())["step"] == "10/110"
        file.write(row[-20:])
    known = said(watched.look())
    assert (known["step"], known["restarts"], known["tokens/s"]) == ("20/110", "1", "400")
    end(run)
    state = watched.look()
    assert state.has_ended and said(state)["has"] == "ended" and "ETA" not in said(state)


def test_a_rank_that_is_slow_is_named(tmp_path: Path) -> None:
    run = going_on(tmp_path / "run", comm__slow_rank=1, comm__slow_rank_seconds=0.1)
    assert said(Watched(run).look())["slow"] == "rank 1 costs the others 20.0 % of a step"
    assert "slow" not in said(Watched(going_on(run)).look())


def test_a_run_that_stopped_is_silent(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", metrics=[figures(5, time.time() - 3600, seconds=1.0)], config="steps: 9\n")
    known = said(Watched(run).look())
    assert known["silent for"].startswith("1") and "ETA" not in known


def test_what_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "latest")
    assert "the run to begin" in watched.look().line()
    run = write_run(tmp_path / "run", config="")
    (tmp_path / "latest").symlink_to(run.name)
    assert "the run to begin" in watched.look().line()
    (run / "config.yaml").write_text("steps: 110\n")
    assert "its first step" in watched.look().line()
    # The link leads to another run now; this one is watched.
    (tmp_path / "latest").unlink()
    going_on(run)
    assert said(watched.look())["step"] == "10/110"


def test_a_training_leaves_what_is_read_here(run: Path) -> None:
    state = Watched(run).look()
    assert (state.step, state.share, state.has_ended) == (16, 1.0, True)
    assert {"loss", "tokens/s", "a step", "comm exposed", "held-out loss"} <= said(state).keys()


def test_a_run_that_has_ended_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = going_on(tmp_path / "run")
    end(run)
    assert main(["watch", str(run)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 110/110") and line.endswith("has ended")
    assert main(["watch", str(run / "config.yaml")]) == 2
    assert "no run's folder but a file" in capsys.readouterr().err


def test_it_is_there_at_once_as_it_needs_no_torch(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from paceline.report.watched import Watched
assert Watched(Path(sys.argv[1])).look().step == 10
sys.exit("torch" in sys.modules)
"""
    command = [sys.executable, "-c", script, str(going_on(tmp_path / "run"))]
    assert finished(command, tmp_path, {"PYTHONPATH": str(Path(__file__).parents[2])}) == (0, "", "")


@pytest.mark.parametrize("in_a_terminal", [full(False), True])
def test_ctrl_c_ends_it(tmp_path: Path, in_a_terminal: bool) -> None:
    run = going_on(tmp_path / "[bold]run")
    command = [sys.executable, "-m", "paceline", "watch", str(run)]
    if in_a_terminal:
        pytest.importorskip("rich", reason="the live view needs the text extra")
        command = [sys.executable, __file__, *command]
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with program(command, tmp_path, environment) as watching:
        assert watching.process.stdout is not None
        text = ""
        while "10/110" not in text:
            part = os.read(watching.process.stdout.fileno(), 1 << 16).decode(errors="replace")
            assert part, watching.process.communicate()
            text += part
        if in_a_terminal:
            assert "━" in text and "[bold]run" in text.replace("\r\n", "")
        for pid in watching.alive():
            os.kill(pid, signal.SIGINT)
        status, _, errors = watching.finish()
        assert status == 130, errors
        assert "Traceback" not in errors
        assert not watching.alive()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(TERM="xterm")
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        termios.tcsetwinsize(1, (40, 200))
        os.execv(sys.argv[1], sys.argv[1:])
    try:
        while data := os.read(terminal, 1 << 16):
            os.write(1, data)
    except OSError:
        pass
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
