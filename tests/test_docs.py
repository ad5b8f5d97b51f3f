"""What the documentation tells to type works: every command and every import in it."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.cli import parse_bench_arguments
from paceline.checkpoint.arguments import CheckpointArguments
from paceline.command_line.parse import parse
from paceline.faults.arguments import FaultsArguments
from paceline.plan.arguments import PlanArguments
from paceline.plan.check_cli import main as check
from paceline.plan.published.validate_cli import ValidateArguments
from paceline.report.report_command import ReportArguments
from paceline.train.command_line import parse_train_arguments
from paceline.verify.arguments import parse as parse_verify_arguments

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(*languages: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
        found += [(page.name, text) for language, text in fenced if language in languages]
    return found


def commands() -> list[tuple[str, list[str]]]:
    lines = []
    for page, text in blocks("bash", ""):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            while words and "=" in words[0]:
                words = words[1:]
            if words and words[0] in ("paceline", "make", "torchrun"):
                lines.append((page, words))
    return lines


@pytest.mark.parametrize(
    ("page", "words"), commands(), ids=lambda value: " ".join(value) if isinstance(value, list) else value
)
def test_every_command_is_understood(page: str, words: list[str], tmp_path: Path, monkeypatch) -> None:
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    if words[0] == "torchrun":
        words = words[words.index("paceline") :] if "paceline" in words else words
        if words[0] == "torchrun":
            assert (ROOT / words[-1]).is_file()
            return
    if words[1] == "train":
        # Files and folders that a reader would bring.
        monkeypatch.chdir(tmp_path)
        for word in words[2:]:
            if word.endswith((".yaml", ".yml")):
                Path(word).parent.mkdir(exist_ok=True)
                Path(word).write_text("steps: 5\n")
        Path("runs/latest").mkdir(parents=True)
        Path("runs/latest/config.yaml").write_text("steps: 5\n")
        assert parse_train_arguments([word for word in words[2:] if word not in ("--print-config", "--help")]).steps > 0
    elif words[1] == "bench":
        parse_bench_arguments(words[2:])
    elif words[1] == "plan":
        if "--validate" in words:
            parse(ValidateArguments, words[2:], "paceline plan")
            return
        options = parse(PlanArguments, words[2:], "paceline plan")
        assert (options.devices or 0) > 0 or options.here
    elif words[1] == "checkpoint":
        assert parse(CheckpointArguments, words[2:], "paceline checkpoint").path
    elif words[1] == "faults":
        parse(FaultsArguments, words[2:], "paceline faults")
    elif words[1] == "check":
        assert check(words[2:]) == 0
    elif words[1] == "verify":
        assert parse_verify_arguments(words[2:]).workers > 0
    elif words[1] == "report":
        assert parse(ReportArguments, words[2:], "paceline report").run
    else:
        assert words[1] in ("sample", "watch", "trace", "completion", "help", "version")


@pytest.mark.full
def test_what_commands_of_the_planner_print_is_what_the_page_shows() -> None:
    text = (ROOT / "docs" / "planning.md").read_text()
    assert script("make_forecasts")["page"](text) == text, "run docs/make_forecasts.py"


def test_there_are_commands_to_try() -> None:
    assert len(commands()) > 8


@pytest.mark.parametrize(("page", "text"), blocks("python"), ids=lambda value: value[:30])
def test_python_in_the_documentation_compiles_and_names_what_exists(page: str, text: str) -> None:
    import paceline as pl

    compile(text, page, "exec")
    for name in re.findall(r"\bpl\.(\w+)", text):
        assert hasattr(pl, name), f"{page}: pl.{name}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def script(name: str) -> dict[str, Any]:
    """What a script of the documentation defines."""
    return runpy.run_path(str(ROOT / "docs" / f"{name}.py"))


def test_the_tables_are_what_the_schedules_and_results_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    # As fresh as for who runs the script: another test may have put formulas in another order.
    for name in ("collective_tables", "strategy_tables", "make_tutorial"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    pages = script("make_tables")["pages"]()
    names = {"benchmarks.md", "README.md", "strategies.md", "collectives.md", "tutorial.md"}
    assert {path.name for path in pages} == names
    for path, text in pages.items():
        assert path.read_text() == text, "run docs/make_tables.py"


def test_the_pictures_of_the_strategies_are_of_the_schedules_as_they_are() -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    drawing = script("make_pictures")
    assert len(drawing["PICTURES"]) == 2
    for name, shown in drawing["PICTURES"].items():
        picture = image.open(ROOT / "docs" / "images" / name)
        assert picture.text["Schedules"] == drawing["fingerprint"](*shown), "run docs/make_pictures.py"
