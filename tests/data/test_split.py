from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.data.documents import Document
from paceline.data.scan import Sample, Scan, scan
from paceline.data.split import (
    hash_document,
    is_validation,
    nominal_threshold,
    settled_threshold,
)

contents = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=60)


def scan_all(texts: list[bytes], fraction: float) -> tuple[Scan, list[bytes]]:
    found, reader = scan(lambda: (Document("", text) for text in texts), fraction, lambda size: None)
    return found, [text for _, text in reader()]


@given(contents, st.floats(0.01, 0.99), st.randoms())
def test_split_depends_on_neither_order_nor_neighbours(
    texts: list[bytes], fraction: float, chooser: random.Random
) -> None:
    threshold = nominal_threshold(fraction)
    held_out = {text for text in texts if is_validation(hash_document(text), threshold)}
    shuffled = texts.copy()
    chooser.shuffle(shuffled)
    assert held_out == {text for text in shuffled if is_validation(hash_document(text), threshold)}


@given(st.sets(st.binary(min_size=1, max_size=20), min_size=2, max_size=30), st.floats(0.001, 0.999))
def test_two_different_documents_never_leave_a_side_empty(texts: set[bytes], fraction: float) -> None:
    found, _ = scan_all(sorted(texts), fraction)
    assert min(found.documents) > 0
    hashes = {hash_document(text).split for text in texts}
    assert is_validation(hash_document(min(texts, key=lambda t: hash_document(t).split)), found.threshold)
    usual = sum(h < nominal_threshold(fraction) for h in hashes)
    assert found.documents[1] == min(max(usual, 1), len(hashes) - 1)


@given(contents, st.floats(0.01, 0.99), st.randoms())
def test_scan_counts_do_not_depend_on_order_but_its_digest_does(
    texts: list[bytes], fraction: float, chooser: random.Random
) -> None:
    texts = [*texts, b"one more", b"and another"]
    shuffled = texts.copy()
    chooser.shuffle(shuffled)
    first, second = scan_all(texts, fraction)[0], scan_all(shuffled, fraction)[0]
    assert (first.documents, first.sizes, first.sample) == (second.documents, second.sizes, second.sample)
    assert (first.content == second.content) == (texts == shuffled)
    assert sum(first.documents) == len(texts) and sum(first.sizes) == sum(map(len, texts))


def test_fraction_is_met_on_average() -> None:
    threshold = nominal_threshold(0.05)
    held_out = sum(is_validation(hash_document(b"%d" % number), threshold) for number in range(20_000))
    assert 900 < held_out < 1100  # 1000 +- 3.2 standard deviations


def test_equal_hashes_cannot_be_split() -> None:
    assert settled_threshold(0.5, 7, 7) is None
    assert settled_threshold(0.5, 7, 8) == 8


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.9])
def test_one_document_is_split_by_sections(fraction: float) -> None:
    text = b"".join(b"line %d\n" % number for number in range(500))
    found, sections = scan_all([text], fraction)
    assert b"".join(sections) == text
    assert min(found.documents) > 0 and sum(found.documents) == len(sections)
    assert all(section.endswith(b"\n") for section in sections)


@pytest.mark.parametrize("texts", [[b"abc"], [b"\n" * 1000], [b"abc", b"abc"]])
def test_text_that_cannot_be_split_is_refused(texts: list[bytes]) -> None:
    with pytest.raises(UserError, match="nothing can be held out"):
        scan_all(texts, 0.05)


def test_no_document_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="no text found"):
        scan_all([], 0.05)


@given(contents)
def test_held_out_text_and_tokenizer_sample_are_the_two_sides(texts: list[bytes]) -> None:
    texts = [*texts, b"one more", b"and another"]
    found, _ = scan_all(texts, 0.3)
    held_out = [text for text in texts if is_validation(hash_document(text), found.threshold)]
    rest = [text for text in texts if not is_validation(hash_document(text), found.threshold)]
    assert found.held_out == b"".join(held_out)
    assert sorted(found.sample) == sorted(rest)


@given(contents, st.randoms())
def test_sample_is_bounded_and_independent_of_order(texts: list[bytes], chooser: random.Random) -> None:
    def sampled(texts: list[bytes]) -> list[bytes]:
        sample = Sample(limit=100)
        for text in texts:
            sample.offer(hash_document(text), text)
        return sample.documents()

    kept = sampled(texts)
    assert sum(map(len, kept)) <= 100
    assert kept == sorted(kept, key=lambda text: hash_document(text).priority)
    if sum(map(len, texts)) <= 100:
        assert sorted(kept) == sorted(texts)
    chooser.shuffle(texts)
    assert sampled(texts) == kept
