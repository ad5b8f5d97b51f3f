"""Runs the blocks of tutorial.md on two hosts with a slow link, and keeps their figures and pictures.

It needs what `paceline bench network` needs, Debian's Chromium with its driver, and selenium:

python docs/make_tutorial.py

Then docs/make_tables.py writes the figures into the page. Under torchrun it runs the blocks once, where it is started.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "tutorial.md"
PICTURES = DOCS / "images" / "tutorial"
RESULTS = DOCS / "results" / "tutorial.json"
ROUNDS = int(os.environ.get("ROUNDS", 3))
GBIT = 0.25
WIDTH, HEIGHT = 900, 3000
"""Pixels of a window in which a page's whole timeline is in view."""


def blocks() -> list[str]:
    """The blocks of Python, in order."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def results() -> dict[str, Any]:
    """The figures that are kept."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def read(folder: Path, instead: Mapping[str, str] | None = None, shows: bool = False) -> dict[str, Any]:
    """What all names mean at the end, when a rank has run the blocks in a folder, with some words replaced."""
    names: dict[str, Any] = {"__name__": "tutorial"}
    with contextlib.chdir(folder), contextlib.redirect_stdout(sys.stdout if shows else io.StringIO()):
        for text in blocks():
            for old, new in (instead or {}).items():
                text = text.replace(old, new)
            exec(compile(text, PAGE.name, "exec"), names)
    return names


def run_rounds(folder: Path) -> None:
    """As a rank: runs the blocks several times; rank 0 keeps the figures of each."""
    rounds = []
    for number in range(ROUNDS):
        print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
        names = read(folder)
        rounds.append(names["measured"])
    if names["world"].rank == 0:
        (folder / "rounds.json").write_text(json.dumps(rounds))
    names["pl"].shutdown()


def measure(folder: Path) -> dict[str, Any]:
    """Runs the rounds on hosts of this machine; gives the figures, and what the link between them carried."""
    from paceline.bench.network.hosts import INTERFACE, Hosts, address
    from paceline.bench.network.jobs import PORT, measure_link

    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    with Hosts(2, GBIT) as hosts:
        link = measure_link(hosts, GBIT)
        agents = []
        for host in range(hosts.count):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            command += ["--node-rank", str(host), "--master-addr", address(0), "--master-port", str(PORT)]
            command += ["--local-addr", address(host), str(Path(__file__).resolve()), str(folder)]
            agents.append(hosts.start(host, command, environment, subprocess.DEVNULL))
        statuses = [agent.wait() for agent in agents]
        if any(statuses):
            raise SystemExit("the blocks failed on a host")
    rounds = json.loads((folder / "rounds.json").read_text())
    steps = {
        name: {key: _middle([each[name][key] for each in rounds]) for key in rounds[0][name]} for name in rounds[0]
    }
    return {
        "command": "python docs/make_tutorial.py",
        "link": asdict(link),
        "gbit": GBIT,
        "rounds": len(rounds),
        "steps": steps,
    }


def lines(found: Mapping[str, Any]) -> dict[str, str]:
    """What the page says of each step, of all of them, and of where that was."""
    texts, rows = (
        {},
        ["| step | ms | standing still, ms | sent, MiB | collectives | held, MiB |", "|---|" + "---:|" * 5],
    )
    for name, figures in found["steps"].items():
        took, still = (f"{figures[key][0]:.0f} ± {figures[key][1]:.0f}" for key in ("ms", "exposed_ms"))
        sent, held = (f"{figures[key][0]:.1f}" for key in ("sent_mib", "held_mib"))
        count, share = f"{figures['collectives'][0]:.0f}", figures["exposed_ms"][0] / figures["ms"][0]
        texts[name] = (
            f"**Measured:** a step takes {took} ms, of which computing stands still for {still} ms "
            f"({100 * share:.0f} %); a rank sends {sent} MiB in {count} collectives and holds {held} MiB."
        )
        rows.append(
            f"| {name.replace('-', '. ', 1).replace('-', ' ')} | {took} | {still} | {sent} | {count} | {held} |"
        )
    machine = found["machine"]
    texts["course"] = "\n".join(rows)
    texts["machine"] = (
        f"Machine: {machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}, {found['rounds']} rounds, a "
        f"link that carries {found['link']['rate'] * 8e-9:.2f} Gbit/s of TCP each way; `{found['command']}`."
    )
    return texts


def _middle(values: list[float]) -> list[float]:
    """The median, and half the distance between the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [middle, (high - low) / 2]


def photograph(folder: Path) -> None:
    """The timeline of each page, without what is predicted, in few colours."""
    from PIL import Image
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    own = f"--user-data-dir={folder}/own"
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={WIDTH},{HEIGHT}", own):
        options.add_argument(flag)
    window = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    PICTURES.mkdir(exist_ok=True)
    try:
        for page in sorted(folder.glob("*.html")):
            window.get(page.as_uri())
            shown = "[...document.querySelectorAll('#predicted:not([hidden])')]"
            window.execute_script(f"{shown}.forEach((button) => button.click())")
            # A busy machine takes a while to show what was drawn.
            window.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 500))")
            file = PICTURES / f"{page.stem}.png"
            window.find_element("id", "lanes").screenshot(str(file))
            Image.open(file).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(file, optimize=True)
    finally:
        window.quit()


def main() -> None:
    """Measures, writes the figures and takes the pictures."""
    from paceline.measuring.results import write_json

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        figures = measure(folder)
        write_json(str(RESULTS), [], figures)
        photograph(folder)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rounds(Path(sys.argv[1])) if len(sys.argv) > 1 else read(Path.cwd(), shows=True)
    else:
        main()
