from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.plan.published.predict import machines, predict, profile
from paceline.plan.published.table import Row, read


def row(tmp_path: Path, **cells: object) -> Row:
    file = tmp_path / "row.csv"
    file.write_text(",".join(cells) + "\n" + ",".join(f'"{cell}"' for cell in cells.values()) + "\n", encoding="utf-8")
    return read(file).rows[0]


CELLS = {
    "model": "Llama 3.1 8B",
    "n_gpus": 64,
    "gpu": "h100_80gb",
    "seq_len": 8192,
    "local_batch_size": 1,
    "tokens_per_s_per_gpu": 5000,
}


@pytest.mark.parametrize(
    ("gpu", "stack", "name"),
    [
        ("a100_40gb", "composer", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "fsdp", "a100"),
        ("a100", "megatron", "a100"),
        ("H100", "torchtitan", "h100-96gb"),
        ("h200", "torchtitan", "h200"),
        ("NVIDIA H100 PCIe", "fsdp", "h100-pcie"),
        ("gb200", "nemo", "gb200"),
        ("v100-32gb", "fsdp", "v100"),
        ("8xA100", "fsdp", "a100"),
        ("H100 x8", "fsdp", "h100"),
        ("NVIDIA GeForce RTX 4090", "fsdp", "4090"),
        ("H200 141GB", "fsdp", "h200"),
        ("MI300X 192GB", "fsdp", "mi300x"),
    ],
)
def test_devices_by_the_names_that_tables_use(gpu: str, stack: str, name: str) -> None:
    assert profile(gpu, stack).device.name == name


def test_columns_that_tell_of_another_time_are_named(tmp_path: Path) -> None:
    def said(**others: object) -> list[str]:
        marks = predict(row(tmp_path, **{**CELLS, **others})).described.assumed
        return [each for each in marks if "would be" in each]

    assert said(step_time_s=1.6384) == []
    assert said(step_time_s=1.6384, samples_per_s=39) == []  # of 39.06
    assert said(step_time_s=1.6384, samples_per_s=40.5) == []  # 4 % off
    assert said(step_time_s=9) == ["tokens_per_s_per_gpu 5000 would be steps of 1.638 s"]
    assert said(step_time_s=1.6384, samples_per_s=45.5) == ["samples_per_s 45.5 would be steps of 1.407 s"]


def test_what_a_row_says_changes_its_forecast(tmp_path: Path) -> None:
    plain = predict(row(tmp_path, **CELLS)).step.total
    compiled = predict(row(tmp_path, **CELLS, compile="yes")).step.total
    eight = predict(row(tmp_path, **CELLS, compile="yes", float8="yes")).step.total
    again = predict(row(tmp_path, **CELLS, activation_checkpointing="full")).step.total
    slow = predict(row(tmp_path, **CELLS, interconnect="10 Gb/s")).step.total
    by_rows = predict(row(tmp_path, **CELLS, compile="yes", float8="rowwise")).step.total
    assert eight < by_rows
    assert eight < compiled < plain < again < slow


def test_a_program_that_compiles_is_as_slow_as_others_where_a_row_says_it_did_not(tmp_path: Path) -> None:
    def computed(**cells: object) -> float:
        return predict(row(tmp_path, **CELLS, **cells)).step.compute

    assert computed(source="fms-fsdp", compile="no") == pytest.approx(computed(compile="no"))
    assert computed(source="fms-fsdp") == computed(source="fms-fsdp", compile="yes") < 0.9 * computed(compile="no")


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("RoCE 1600 Gb/s per node (stated for A100)", 25e9),
        ("800 Gbps node-node", 12.5e9),
        ("8x400 Gb/s InfiniBand", 50e9),
        ("200 Gbps", 25e9),
        ("NVLink 900 GB/s, EFA 3.2 Tbps", 50e9),
        ("50 GB/s per GPU", 50e9),
        ("400 Gigabit", 50e9),
        ("InfiniBand", None),
        ("0 Gb/s", None),
    ],
)
def test_a_network_is_a_host_s_or_a_device_s(tmp_path: Path, words: str, size: float | None) -> None:
    described = predict(row(tmp_path, **CELLS, interconnect=words)).described
    assert described.network == (None if size is None else pytest.approx(size))


def test_how_a_network_was_read_is_told_where_its_words_leave_that_open(tmp_path: Path) -> None:
    def told(words: str, gpus: int) -> list[str]:
        cells = {**CELLS, "interconnect": words, "n_gpus": gpus}
        return [each for each in predict(row(tmp_path, **cells)).described.assumed if "network" in each]

    assert told("InfiniBand", 16) == ["network 'InfiniBand' tells no rate between hosts, the datasheet's assumed"]
    assert told("200 Gbps", 16) == ["network '200 Gbps' for each device"]
    assert told("8x400 Gb/s", 16) == told("50 GB/s per GPU", 16) == told("InfiniBand", 8) == []


def test_a_row_s_network_is_what_its_forecast_uses(tmp_path: Path) -> None:
    described = predict(row(tmp_path, **CELLS, network="200 Gbps")).described
    assert machines(described).between.bandwidth == pytest.approx(0.8 * 25e9)
    titled = predict(row(tmp_path, **CELLS, table="H100 80GB with 1600 Gbps node-node interconnect")).described
    assert titled.network == pytest.approx(25e9)
    assert predict(row(tmp_path, **CELLS, table="H100 80GB BF16")).described.network is None


@pytest.mark.parametrize(
    "gpu", ["RTX A1000 6GB", "H100 NVL", "A100-PCIe-80GB", "V100-SXM2-16GB", "my_h100.json", "a100x", "H100 94GB"]
)
def test_a_device_like_one_that_there_is_a_profile_of_is_not_taken_for_it(gpu: str) -> None:
    with pytest.raises(UserError, match=r"^gpu: .*expected "):
        profile(gpu, "")


def test_a_device_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gpu: abacus: expected one of"):
        predict(row(tmp_path, **{**CELLS, "gpu": "abacus"}))
    with pytest.raises(UserError, match="v100: expected a precision"):
        predict(row(tmp_path, **{**CELLS, "gpu": "v100", "precision": "bf16"}))
