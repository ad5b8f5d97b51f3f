from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.plan.published.columns import SYNONYMS, resolve
from paceline.plan.published.sets import PUBLISHED
from paceline.plan.published.table import read


def write(path: Path, text: str) -> Path:
    file = path / "rows.csv"
    file.write_text(text, encoding="utf-8")
    return file


def test_columns_by_any_name_and_in_any_unit(tmp_path: Path) -> None:
    table = read(
        write(tmp_path, 'Num GPUs,Step time (ms),MFU %,memory_gib,colour,n_params_b\n"1,024",250,41.5,70.5,red,8\n')
    )
    (row,) = table.rows
    assert table.unknown == ("colour",)
    assert row.whole("devices") == 1024
    assert row.number("seconds") == pytest.approx(0.25)
    assert row.number("mfu") == pytest.approx(0.415)
    assert row.number("peak_bytes") == pytest.approx(70.5 * 2**30)
    assert row.number("n_params") == 8e9
    assert row.line == 2 and row.raw["colour"] == "red"


@pytest.mark.parametrize(
    ("header", "means"),
    [
        ("peak_gib", ("peak_bytes", 2.0**30)),
        ("Peak (GB)", ("peak_bytes", 1e9)),
        ("peak_pct", ("hfu", 0.01)),
        ("memory_pct", ("memory_share", 0.01)),
        ("mfu_gib", None),
        ("step_time_gib", None),
        ("n_gpus_ms", None),
    ],
)
def test_a_column_has_a_unit_of_its_own_kind(header: str, means: tuple[str, float] | None) -> None:
    assert resolve(header) == means


def test_no_two_things_share_a_name() -> None:
    names = [name for each in SYNONYMS.values() for name in each.split()]
    assert len(names) == len(set(names))


@given(st.text(max_size=30))
def test_any_name_of_a_column_is_known_or_not(header: str) -> None:
    found = resolve(header)
    assert found is None or found[0] in {*SYNONYMS, "memory_share"}


def test_a_line_of_another_length_is_kept_with_its_fault(tmp_path: Path) -> None:
    table = read(write(tmp_path, "gpu,n_gpus\na100,8\na100\n\na100,8,9\n"))
    assert [row.fault[:18] for row in table.rows] == ["", "expected 2 cells a", "expected 2 cells a"]
    assert [row.line for row in table.rows] == [2, 3, 5]


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_a_line_ends_where_the_file_s_lines_end_and_nowhere_else(tmp_path: Path, ends: str) -> None:
    text = ends.join(["\ufeffgpu,n_gpus,notes", "h100,8,a\u2028b\x0cc", 'h100,16,"of two', 'lines"', ""])
    (tmp_path / "rows.csv").write_bytes(text.encode())
    table = read(tmp_path / "rows.csv")
    assert [row.whole("devices") for row in table.rows] == [8, 16]
    assert [row.fault for row in table.rows] == ["", ""] and not table.unknown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names the columns"),
        ("a,b\n", "got none"),
        ("gpu;n_gpus\nh100;8\n", "expected commas between columns, .* got ';'"),
        ('gpu\n"a', "got what is none"),
        (" , \n1,2\n", "names the col"),
        ("gpu,step_time_s, step_time_s\nh100,9.5,1\n", "'step_time_s' twice"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(write(tmp_path, text))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found no file"):
        read(tmp_path / "none.csv")
    with pytest.raises(UserError, match="folder"):
        read(tmp_path)
    (tmp_path / "bytes.csv").write_bytes(b"gpu\n\xff\xfe\n")
    with pytest.raises(UserError, match="UTF-8"):
        read(tmp_path / "bytes.csv")


def test_a_cell_that_is_no_number_says_so(tmp_path: Path) -> None:
    (row,) = read(write(tmp_path, "gpu,n_gpus,seq_len\nh100,many,2048.5\n")).rows
    with pytest.raises(UserError, match="n_gpus: expected a number, got 'many'"):
        row.whole("devices")
    with pytest.raises(UserError, match="seq_len: expected a whole number"):
        row.whole("context")


def test_a_row_is_told_by_the_line_on_which_it_begins(tmp_path: Path) -> None:
    found = read(write(tmp_path, 'gpu,notes\nh100,"a\nb\nc"\n\na100,x\n'))
    assert [row.line for row in found.rows] == [2, 6]


@pytest.mark.parametrize(
    ("cell", "number"), [("1,234", 1234), ("1,234,567.5", 1234567.5), ("12345", 12345), ("1_000", 1000)]
)
def test_commas_stand_between_thousands(tmp_path: Path, cell: str, number: float) -> None:
    (row,) = read(write(tmp_path, f'gpu,step_time_s\nh100,"{cell}"\n')).rows
    assert row.number("seconds") == number


@pytest.mark.parametrize("cell", ["10,5", "1,5", "1,23456", ",5"])
def test_a_comma_that_may_be_a_point_is_refused(tmp_path: Path, cell: str) -> None:
    (row,) = read(write(tmp_path, f'gpu,step_time_s\nh100,"{cell}"\n')).rows
    with pytest.raises(UserError, match=f"expected a number, got '{cell}'"):
        row.number("seconds")


@pytest.mark.parametrize("name", ["llm_foundry.csv", "vtrain_a100.csv", "zero_memory.csv", "megatron_golden_mem.csv"])
def test_published_files_have_no_unknown_columns(name: str) -> None:
    """Whoever prints measurements in the same columns is told of none of them."""
    path = Path(__file__).parents[3] / PUBLISHED / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    assert not read(path).unknown
