from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.models.flops import peak_flops
from paceline.plan import profiles


@pytest.mark.parametrize("name", ["h100", "H100", "h100_80gb", "H100-SXM5-80GB", " h100-sxm "])
def test_a_device_is_found_by_each_of_its_names(name: str) -> None:
    found = profiles.hardware(name)
    assert (found.device.name, found.devices_per_host, found.device.watts) == ("h100", 8, 700)
    assert found.device.peak["bfloat16"] == 989.4e12


def test_ceilings_are_measured_ones_and_where_nobody_measured_a_usual_share() -> None:
    assert profiles.hardware("a100").device.ceiling["bfloat16"] == pytest.approx(271.2e12)
    assert profiles.hardware("h100-pcie").device.ceiling["bfloat16"] == pytest.approx(0.8 * 756e12)
    assert "bfloat16" not in profiles.hardware("v100").device.ceiling


def test_every_profile_holds_what_a_machine_can_have() -> None:
    for name in profiles.names():
        found = profiles.hardware(name)
        device = found.device
        assert 20 * 2**30 < device.memory < 300 * 2**30 and 500e9 < device.bandwidth < 10e12
        assert all(device.ceiling[dtype] < peak for dtype, peak in device.peak.items())
        assert found.within.bandwidth > found.between.bandwidth > 1e9
        assert name.split("-")[0] in found.source.lower()


def test_the_guide_names_every_profile() -> None:
    guide = (Path(__file__).parents[2] / "docs/planning.md").read_text()
    told = re.search(r"is a datasheet's: (.+?), with", guide, re.DOTALL)
    assert told and re.split(r",\s+|\s+or\s+", told[1]) == profiles.names()


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("h100-pcie", "NVIDIA H100 PCIe"),
        ("h200", "NVIDIA H200"),
        ("gh200", "NVIDIA GH200 480GB"),
        ("b200", "NVIDIA B200"),
        ("gb200", "NVIDIA GB200"),
        ("mi300x", "AMD Instinct MI300X"),
        ("l40s", "NVIDIA L40S"),
        ("4090", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_peaks_are_those_that_a_runs_mfu_counts_against(name: str, called: str) -> None:
    peak = profiles.hardware(name).device.peak
    assert peak["bfloat16"] == peak_flops(called)
    if (single := peak_flops(called, "float32")) is not None:
        assert peak["float32"] == single


@pytest.mark.parametrize(
    ("name", "near"),
    [("h10", "h100"), ("a10", "a100"), ("h100-nvl", "h100"), ("rtx", "4090"), ("mi300", "mi300x")],
)
def test_an_unknown_name_is_told_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"--hardware {name}: expected one of v100, .*did you mean .*{near}"):
        profiles.hardware(name)
    with pytest.raises(UserError, match="--here"):
        profiles.hardware("zzz")
