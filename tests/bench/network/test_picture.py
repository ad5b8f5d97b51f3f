from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from paceline.bench.network.rows import NetworkRow

pytest.importorskip("matplotlib")

ROW = NetworkRow("systems", "1 M parameters", "paceline", "manual", 2, 1, 1.0, 1500, 20, 600, 640, 2.3, 0.1, 80e6, 700)
ALONE = dataclasses.replace(ROW, system="one process", setting="no communication", wire_ms=0, median_ms=600)
SYSTEMS = [ALONE, ROW, dataclasses.replace(ROW, setting="buckets, overlapped", median_ms=900)]
BUCKETS = [
    dataclasses.replace(row, experiment="buckets", setting=f"{size:g} MiB")
    for row, size in ((ALONE, 0), (ROW, 0.5), (ROW, 25))
]


@pytest.mark.full
@pytest.mark.parametrize("rows", [SYSTEMS, BUCKETS, SYSTEMS + BUCKETS])
def test_the_picture_shows_the_experiments_that_were_run(rows: list[NetworkRow], tmp_path: Path) -> None:
    import matplotlib

    from paceline.bench.network.picture import draw

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(rows, tmp_path / "steps.svg")
    texts = [node.text for node in ElementTree.parse(tmp_path / "steps.svg").iter() if node.tag.endswith("text")]
    assert ("buckets, overlapped" in texts and "  900 ms" in texts) == (rows != BUCKETS)
    assert ("bucket in MiB" in texts and "25" in texts) == (rows != SYSTEMS)
    draw(rows, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
