from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.data import Corpus, Tokenizer, preparation, prepare, scan, unreadable
from paceline.data.documents import read
from paceline.data.sources import find
from paceline.data.split import hash_document, is_validation, nominal_threshold
from tests.data.caches import Configure, entries
from tests.data.prose import prose


def decoded(corpus: Corpus) -> tuple[list[str], list[str]]:
    """The documents of both sides, read back from their tokens."""
    tokenizer = Tokenizer.load(corpus.tokenizer)
    sides = []
    for file in (corpus.train, corpus.validation):
        ends = np.flatnonzero(file.tokens == tokenizer.end_of_text)
        assert ends[0] == 0 and ends[-1] == len(file) - 1
        parts = zip(ends[:-1] + 1, ends[1:], strict=True)
        sides.append([tokenizer.decode(file.tokens[start:end].tolist()) for start, end in parts])
    return sides[0], sides[1]


class Counter:
    """Counts calls of a function and passes them on."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, *arguments: object, **fields: object) -> object:
        self.calls += 1
        return self.function(*arguments, **fields)


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter(preparation.tokenise)
    monkeypatch.setattr(preparation, "tokenise", counter)
    return counter


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter(unreadable.scan)
    monkeypatch.setattr(unreadable, "scan", counter)
    return counter


def test_documents_stand_whole_on_their_side_and_in_order(folder: Path, configure: Configure) -> None:
    corpus = prepare(configure(folder))
    expected: tuple[list[str], list[str]] = ([], [])
    for _, text in read(find((str(folder),)).files, "text"):
        expected[is_validation(hash_document(text), nominal_threshold(0.2))].append(text.decode())
    assert decoded(corpus) == expected
    assert min(map(len, expected)) > 3


def test_facts_are_those_of_the_text(folder: Path, configure: Configure) -> None:
    (folder / "picture.png").write_bytes(b"\0")
    corpus = prepare(configure(folder))
    facts = corpus.facts
    train, validation = decoded(corpus)
    assert (facts.files, facts.ignored, facts.source) == (60, {".png": 1}, str(folder))
    assert (facts.train.documents, facts.validation.documents) == (len(train), len(validation))
    assert facts.train.bytes == corpus.train.bytes == len("".join(train).encode())
    assert facts.validation.bytes == corpus.validation.bytes == len("".join(validation).encode())
    assert (facts.train.tokens, facts.validation.tokens) == (len(corpus.train), len(corpus.validation))
    assert facts.vocabulary == Tokenizer.load(corpus.tokenizer).vocabulary == 300
    assert facts.baseline_bytes == facts.validation.bytes
    assert 0 < facts.xz_bits_per_byte < 8 and 0 < facts.gzip_bits_per_byte < 8
    assert corpus.train.tokens.dtype == np.uint16 and not corpus.train.tokens.flags.writeable


def test_baselines_are_the_compressors_own_figures(tmp_path: Path, configure: Configure) -> None:
    import gzip
    import lzma

    (tmp_path / "a.txt").write_text(prose(3000, 1))
    (tmp_path / "b.txt").write_text(prose(3000, 2))
    corpus = prepare(configure(tmp_path / "a.txt", tmp_path / "b.txt"))
    text = "".join(decoded(corpus)[1]).encode()
    assert corpus.facts.gzip_bits_per_byte == 8 * len(gzip.compress(text, 9)) / len(text)
    xz = 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
    assert corpus.facts.xz_bits_per_byte == pytest.approx(xz, rel=0.001)


def test_tokenizer_never_sees_a_held_out_document(
    folder: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    train = preparation.train

    def spy(texts: object, vocabulary: int) -> str:
        seen.extend(texts)  # type: ignore[arg-type]
        return train(seen, vocabulary)

    monkeypatch.setattr(preparation, "train", spy)
    expected, held_out = decoded(prepare(configure(folder)))
    assert sorted(seen) == sorted(expected) and not set(seen) & set(held_out)


def test_result_is_the_same_to_the_byte_for_any_number_of_threads(
    folder: Path, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.tokenise.BATCH_BYTES", 1000)
    results = []
    for threads in (1, 2, 5):
        cache = tmp_path / f"cache{threads}"
        prepare(configure(folder, cache=str(cache)), threads=threads)
        results.append(entries(cache))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 5


def test_second_run_reads_nothing(folder: Path, configure: Configure, tokenised: Counter, scanned: Counter) -> None:
    first = prepare(configure(folder))
    second = prepare(configure(folder))
    assert (tokenised.calls, scanned.calls) == (1, 1)
    assert first == second and np.array_equal(first.train.tokens, second.train.tokens)


def test_touched_or_moved_text_is_read_but_not_tokenised_again(
    folder: Path, configure: Configure, tokenised: Counter, scanned: Counter
) -> None:
    first = prepare(configure(folder))
    os.utime(folder / "part0" / "00.txt", ns=(1, 1))
    second = prepare(configure(folder))
    moved = folder.rename(folder.with_name("moved"))
    third = prepare(configure(moved))
    assert (tokenised.calls, scanned.calls) == (1, 3)
    assert first.folder == second.folder == third.folder
    assert third.facts.source == str(moved)


def test_changed_text_and_changed_settings_are_prepared_anew(
    folder: Path, configure: Configure, tokenised: Counter
) -> None:
    first = prepare(configure(folder))
    path = folder / "part0" / "00.txt"
    path.write_text(path.read_text().upper())
    keys = {first.folder, prepare(configure(folder)).folder}
    keys.add(prepare(configure(folder, vocabulary=310)).folder)
    keys.add(prepare(configure(folder, validation=0.3)).folder)
    keys.add(prepare(configure(folder, tokenizer=str(first.tokenizer))).folder)
    assert tokenised.calls == len(keys) == 5


def test_given_tokenizer_is_used_as_it_is(folder: Path, configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("\n".join(f"entirely other words {number}" for number in range(200)))
    trained = prepare(configure(tmp_path / "other.txt", vocabulary=270))
    corpus = prepare(configure(folder, tokenizer=str(trained.tokenizer)))
    assert corpus.tokenizer.read_bytes() == trained.tokenizer.read_bytes()
    assert corpus.facts.vocabulary == 270
    assert sum(map(len, decoded(corpus))) == 60


def test_text_that_changes_while_it_is_read_is_refused(
    folder: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = preparation.train

    def disturb(texts: object, vocabulary: int) -> str:
        (folder / "part1" / "01.txt").write_text("something else")
        return train(texts, vocabulary)  # type: ignore[arg-type]

    monkeypatch.setattr(preparation, "train", disturb)
    with pytest.raises(UserError, match="changed while it was being read"):
        prepare(configure(folder))
    assert entries(configure().cache_folder) == {}
    monkeypatch.undo()
    assert "something else" in [text for side in decoded(prepare(configure(folder))) for text in side]


def test_one_small_document_is_split_by_sections(tmp_path: Path, configure: Configure) -> None:
    path = tmp_path / "one.txt"
    path.write_text(prose(4000, 1))
    corpus = prepare(configure(path, validation=0.05))
    train, validation = decoded(corpus)
    assert sorted("".join(train + validation)) == sorted(path.read_text())
    assert 0 < corpus.validation.bytes < 0.25 * corpus.train.bytes


def test_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path, configure: Configure) -> None:
    definition = prepare(configure(_two_files(tmp_path))).tokenizer.read_text()
    wide = tmp_path / "wide.json"
    # The same tokenizer with its end-of-text token at a high id.
    definition = definition.replace('"id": 0,', '"id": 70000,').replace('"<|endoftext|>": 0', '"<|endoftext|>": 70000')
    wide.write_text(definition)
    corpus = prepare(configure(tmp_path / "text", tokenizer=str(wide)))
    assert corpus.train.tokens.dtype == np.uint32
    assert corpus.facts.vocabulary == 70001 and corpus.facts.end_of_text == 70000
    assert sum(map(len, decoded(corpus))) == 2


def test_a_very_long_line_of_jsonl_survives(
    tmp_path: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.tokenise.LARGE", 1000)
    monkeypatch.setattr("paceline.data.tokenise.PIECE", 100)
    long, short = prose(2000, 1), prose(10, 2)
    path = tmp_path / "a.jsonl"
    import json

    path.write_text("\n".join(json.dumps({"text": text}) for text in (long, short)))
    train, validation = decoded(prepare(configure(path)))
    assert sorted(train + validation) == sorted([long, short])


def test_baselines_read_a_bounded_part(folder: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "HELD_OUT_BYTES", 1000)
    lines: list[str] = []
    corpus = prepare(configure(folder), report=lines.append)
    assert corpus.facts.baseline_bytes == 1000 < corpus.facts.validation.bytes
    assert any("measured on its first 1.0 kB" in line for line in lines)


def test_report_tells_what_was_found(folder: Path, configure: Configure) -> None:
    (folder / "picture.png").write_bytes(b"\0")
    for _ in range(2):
        lines: list[str] = []
        corpus = prepare(configure(folder), report=lines.append)
        text = "\n".join(lines)
        assert f"{folder}: 60 files, 60 documents" in text and "passed over: 1 .png" in text
        assert f"{corpus.facts.train.tokens:,} to train on" in text and str(corpus.folder) in text
        assert f"gzip -9 needs {corpus.facts.gzip_bits_per_byte:.3f}" in text


def test_files_without_readable_text_are_passed_over_in_one_line_or_listed(folder: Path, configure: Configure) -> None:
    whole = prepare(configure(folder))
    (folder / "part0" / "binary.txt").write_bytes(b"some text first\n" * 9 + b"\0")
    (folder / "part1" / "cut.txt.gz").write_bytes(b"\x1f\x8b cut")
    (folder / "part2" / "other.jsonl").write_text('{"text": "fine"}\n{"title": "none"}\n')
    for _ in range(2):
        lines: list[str] = []
        corpus = prepare(configure(folder), report=lines.append)
        # Nothing of them is in it, not even what came before the first bad byte.
        assert corpus.folder == whole.folder and corpus.facts.files == 60
        (line,) = [line for line in lines if "passed over 3 files without readable text" in line]
        assert "binary.txt is not text: a NUL byte at byte 144" in line
    with pytest.raises(UserError) as refused:
        prepare(configure(folder, unreadable="refuse"))
    assert all(name in str(refused.value) for name in ("binary.txt", "cut.txt.gz", "other.jsonl line 2"))
    assert str(refused.value).count("\n") == 3
    (folder / "part0" / "binary.txt").write_text("text now")
    assert prepare(configure(folder)).facts.files == 61
    with pytest.raises(
        UserError, match=r"no text found in .*other.jsonl: 1 hold no readable text:\n.*'text' is missing"
    ):
        prepare(configure(folder / "part2" / "other.jsonl"))


@pytest.mark.full
def test_standard_library_is_a_corpus(configure: Configure) -> None:
    corpus = prepare(configure(vocabulary=2048, validation=0.05))
    facts = corpus.facts
    assert facts.vocabulary == 2048
    assert 5e6 < facts.train.bytes < 30e6
    assert 0.01 < facts.validation.bytes / facts.train.bytes < 0.15
    assert 2 < facts.train.bytes / facts.train.tokens < 5
    assert 1 < facts.xz_bits_per_byte < facts.gzip_bits_per_byte < 3
    text = Tokenizer.load(corpus.tokenizer).decode(corpus.train.tokens[1:2000].tolist())
    assert "import" in text


def _two_files(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    root.mkdir()
    for number in range(2):
        (root / f"{number}.txt").write_text(prose(200, number))
    return root
