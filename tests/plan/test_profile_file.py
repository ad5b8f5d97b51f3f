from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.plan import profile_file, profiles
from paceline.plan.hardware import Rates


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.json"
    profile_file.write(path, profiles.hardware("h100"))
    return path


def changed(file: Path, *keys: str, value: object) -> None:
    values = json.loads(file.read_text())
    place = values
    for key in keys[:-1]:
        place = place[key]
    if value is None:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    file.write_text(json.dumps(values))


def test_what_is_written_is_read_and_named_like_a_profile(file: Path) -> None:
    assert profile_file.read(file) == profiles.hardware(str(file)) == profiles.hardware("h100")


def test_what_was_measured_is_written_too_and_its_numbers_are_checked(file: Path) -> None:
    here = replace(profiles.hardware("h100"), hooks=1e-5, measured={"gelu float32": Rates(1e-6, 1e-12, 1e-10)})
    profile_file.write(file, here)
    assert profile_file.read(file) == here
    changed(file, "measured", "gelu float32", "per_byte", value=3.0)
    with pytest.raises(UserError, match=r"measured.gelu float32.per_byte: expected seconds"):
        profile_file.read(file)


@pytest.mark.parametrize(
    "name", ["matmul float", "gelu float999", "all_reduce", "all_reduce 0", "copyin", "reduce_scater 2", ""]
)
def test_what_no_plan_looks_for_is_refused(file: Path, name: str) -> None:
    changed(
        file, "measured", value={"update": {"fixed": 1e-6}, "all_gather 16": {"fixed": 1e-6}, name: {"fixed": 1e-6}}
    )
    with pytest.raises(UserError, match=f"measured.{name}: no plan looks for it"):
        profile_file.read(file)


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("device", "memory"), 80, "device.memory: expected bytes, from 1e.08 to 1e.14, got 80; is it in billions"),
        (("device", "bandwidth"), 3350, "expected bytes a second.*got 3350; is it in billions"),
        (("device", "peak", "bfloat16"), 989.4, "device.peak.bfloat16: expected floating-point operations a second"),
        (("device", "ceiling", "bfloat16"), -1, "device.ceiling.bfloat16.*got -1"),
        (("device", "ceiling"), {}, "at least one of float32"),
        (("device", "watts"), "700", "device.watts: Expected `float`, got `str`"),
        (("device", "memory"), 80_000, r"is it in billions \(GB\) or millions \(MB\)\?"),
        (("device", "bandwidth"), 3.35, r"is it in billions \(GB/s\) or trillions \(TB/s\)\?"),
        (("within", "latency"), 2.5, "within.latency: expected seconds, from 0 to 1, got 2.5; is it in milliseconds"),
        (("between", "bandwidth"), 400e18, "between.bandwidth: expected bytes a second"),
        (("kernels", "memory_efficiency"), 80, "expected a share of 1.*is it in .*percent"),
        (("devices_per_host",), 0, "devices_per_host: expected devices"),
        (("kernels",), None, "missing required field `kernels`"),
        (("kind",), "paceline hardware profile", "got kind 'paceline hardware profile' .*bench comm"),
        (("kind",), None, "got kind None"),
        (("version",), 1, "expected version 4, got 1"),
        (("framewrok",), 1e9, "framewrok: a profile has no such value"),
        (("device", "watt"), 700.0, "device.watt: a profile has no such value"),
        (("device", "ceiling", "bfloat16"), 5e15, "device.ceiling.bfloat16: expected at most device.peak.bfloat16"),
        (("device", "memory"), 10**400, "device.memory: Expected `int`, got `float`, in bytes"),
        (("device", "memory"), 79.1, "device.memory: Expected `int`, got `float`, in bytes"),
        (("device", "bandwidth"), None, "device: Object missing required field `bandwidth`, in bytes a second"),
        (("device", "peak", "bfloat16"), 989.4, r"is it in trillions \(TFLOP/s\)"),
        (("device", "peak", "bf16"), 9e14, "device.peak.bf16: expected one of float32.*did you mean bfloat16"),
        (("device", "peak", "b.16"), 9e14, "device.peak.b.16: expected one of float32"),
        (("device", "peak", "b.16"), -1, "device.peak.b.16: expected floating-point operations a second"),
        (("device", "name"), "\ud800", "can't encode character"),
        (("device", "ceiling"), {"float8": 9e14}, "at least one of float32"),
        (("between", "latency"), 8, "between.latency: expected seconds, from 0 to 1, got 8"),
        (("within", "bandwidth"), 900_000, r"within.bandwidth.*got 900000; is it in millions"),
        (("between", "bandwidth"), 50_000, r"between.bandwidth.*got 50000; is it in billions \(GB/s\) or millions"),
        (("framework",), 238, r"framework: expected bytes, from 1e.06 to 1e.12, got 238; is it in billions"),
        (("device", "name"), "h100\x1b[2J", r"device.name: expected one line of printable text, got 'h100\\x1b"),
        (("source",), "a\nb", "source: expected one line of printable text"),
        (("measured",), {"update": {}}, "measured.update: expected seconds above 0"),
        (
            ("measured",),
            {"mm bfloat16": {"per_flop": 1e-16}},
            "1e.16 seconds are 1e.16 operations a second, which does",
        ),
        (("measured",), {"mm bfloat16": {"per_flop": 2e-12}}, "does not go with device.peak.bfloat16, 9.8.e.14"),
        (("measured",), {"all_reduce 2": {"per_byte": 1e-5}}, "per_byte: expected seconds, from 0 to 1e-06"),
        (("units",), "GB, ms", "units: expected 'bytes, .*got 'GB, ms'; convert the numbers"),
    ],
)
def test_a_mistake_in_a_file_says_where_and_what_was_expected(file: Path, keys, value, words: str) -> None:
    changed(file, *keys, value=value)
    with pytest.raises(UserError, match=words) as told:
        profile_file.read(file)
    assert str(file) in str(told.value) and "\n" not in str(told.value)


def test_a_byte_order_mark_before_it_is_no_damage(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert profile_file.read(file) == profiles.hardware("h100")


def test_what_the_framework_takes_may_be_left_unknown(file: Path) -> None:
    changed(file, "framework", value=0)
    assert profile_file.read(file).framework == 0


def test_a_whole_number_may_be_written_with_an_exponent(file: Path) -> None:
    text = file.read_text()
    memory = f'"memory": {profiles.hardware("h100").device.memory}'
    assert memory in text
    file.write_text(text.replace(memory, '"memory": 8.5e10'))
    assert profile_file.read(file).device.memory == 85_000_000_000


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "nonsense", '{"kind": "paceline planner hardware"' * 2, "[" * 100_000]
)
def test_a_damaged_file_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=r"damaged: not JSON|expected an object"):
        profile_file.read(file)


def test_a_file_that_was_cut_anywhere_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for length in range(0, len(whole) - 2, 97):
        file.write_bytes(whole[:length])
        with pytest.raises(UserError):
            profile_file.read(file)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        profile_file.read(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        profile_file.read(tmp_path / "binary.json")
    not_finite = tmp_path / "nan.json"
    profile_file.write(not_finite, profiles.hardware("h100"))
    changed(not_finite, "device", "bandwidth", value=float("nan"))
    with pytest.raises(UserError, match="got nan"):
        profile_file.read(not_finite)
