from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.data import documents
from paceline.data.documents import LARGE, PIECE, Document, divide, read
from paceline.data.sources import find


def read_all(*paths: Path, text_field: str = "text") -> list[Document]:
    return list(read(find(tuple(map(str, paths))).files, text_field))


text = st.text(st.sampled_from("ab é€😀\n\r"), max_size=400)


@given(text, st.integers(4, 40))
def test_pieces_are_text_within_the_size_and_concatenate_to_the_whole(content: str, size: int) -> None:
    pieces = list(divide(content.encode(), size))
    assert b"".join(pieces) == content.encode()
    assert all(0 < len(piece) <= size and piece.decode() for piece in pieces)


@given(text, st.integers(4, 20), st.integers(20, 60))
def test_streaming_gives_the_pieces_of_the_whole_file(content: str, piece: int, large: int) -> None:
    whole = content.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE", piece)
        patch.setattr(documents, "LARGE", large)
        streamed = list(documents._pieces(io.BytesIO(whole)))
    expected = [whole] if 0 < len(whole) <= large else list(divide(whole, piece))
    assert streamed == expected


def test_cuts_prefer_blank_lines_then_newlines_then_characters() -> None:
    assert next(divide(b"aaaaaa\n\nbb\ncc dd", 12)) == b"aaaaaa\n\n"
    assert next(divide(b"aaaaaa\r\n\r\nbb\ncc", 12)) == b"aaaaaa\r\n\r\n"
    assert next(divide(b"aaaaaabbb\ncc ddee", 12)) == b"aaaaaabbb\n"
    assert next(divide(b"\n\naaaaaaaaaaaaaaa", 12)) == b"\n\naaaaaaaaaa"
    assert next(divide("ééééé".encode(), 5)) == "éé".encode()


def test_large_file_becomes_documents_and_small_ones_stay_whole(tmp_path: Path) -> None:
    paragraph = "word " * 200 + "\n\n"
    (tmp_path / "large.txt").write_text(paragraph * (LARGE // len(paragraph) + 50))
    (tmp_path / "small.py").write_text("print()\n")
    *large, small = read_all(tmp_path)
    assert small == (str(tmp_path / "small.py"), b"print()\n")
    assert b"".join(text for _, text in large) == (tmp_path / "large.txt").read_bytes()
    assert all(PIECE // 2 < len(text) <= PIECE and text.endswith(b"\n\n") for _, text in large[:-1])
    assert len({name for name, _ in large}) == len(large)


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".jsonl"])
def test_gz_reads_like_the_plain_file(tmp_path: Path, suffix: str) -> None:
    content = b'{"text": "one"}\n\n{"text": ""}\n{"text": "zwei \\u00fc", "id": 2}'
    (tmp_path / f"a{suffix}").write_bytes(content)
    (tmp_path / f"b{suffix}.gz").write_bytes(gzip.compress(content))
    plain = [text for _, text in read_all(tmp_path / f"a{suffix}")]
    assert plain == [text for _, text in read_all(tmp_path / f"b{suffix}.gz")]
    assert plain == ([b"one", "zwei ü".encode()] if suffix == ".jsonl" else [content])


def test_text_field_is_the_one_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "no", "body": "yes"}))
    assert read_all(path, text_field="body")[0].content == b"yes"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\0bad", "NUL byte at byte 4"),
        ("a.txt", "caf\xe9 noir".encode("latin-1"), "byte 3 is 0xe9"),
        ("a.txt", b"x" * (LARGE + 77) + b"\xff" + b"y" * 99, f"byte {LARGE + 77} is 0xff"),
        ("a.txt", b"\x80" * (LARGE + 2), "byte 0 is 0x80"),
        ("a.txt.gz", b"not compressed", "not a complete gzip file"),
        ("a.txt.gz", gzip.compress(b"cut short" * 99, mtime=0)[:-9], "not a complete gzip file"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": \n', "line 2 is not valid JSON"),
        ("a.jsonl", b'{"text": "\xff"}', "line 1 is not valid JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not valid JSON"),
        ("a.jsonl", b'["a"]', "line 1 holds a list"),
        ("a.jsonl", b'{"body": "x", "id": 1}', "'text' is missing. It has 'body', 'id'"),
        ("a.jsonl", b'{"text": 5}', "'text' is not a string"),
        ("a.jsonl", b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_what_is_not_text_is_refused_with_its_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{name}.*{message}"):
        read_all(path)


def test_file_removed_after_listing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    files = find((str(path),)).files
    path.unlink()
    with pytest.raises(UserError, match=r"a\.txt was removed"):
        list(read(files, "text"))
