from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.data.tokenizer import END_OF_TEXT, Tokenizer, train
from tests.data.prose import prose

TEXTS = [prose(300, seed) for seed in range(20)]
DEFINITION = train(TEXTS, 300)
TOKENIZER = Tokenizer(DEFINITION, "test")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode_batch([text])[0].tolist() == ids
    assert all(token < TOKENIZER.vocabulary for token in ids)


def test_special_tokens_in_text_are_only_text() -> None:
    text = f"a{END_OF_TEXT}b"
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.end_of_text not in ids
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([TOKENIZER.end_of_text]) == END_OF_TEXT


def test_same_texts_give_the_same_tokenizer_to_the_byte() -> None:
    assert train(TEXTS, 300) == DEFINITION
    assert train(reversed(TEXTS), 300) == DEFINITION


def test_vocabulary_is_as_asked_or_smaller_where_text_is_short() -> None:
    assert TOKENIZER.vocabulary == 300
    assert Tokenizer(train(["ab"], 5000), "test").vocabulary == 258
    assert len(TOKENIZER.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(DEFINITION)
    assert Tokenizer.load(path).encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])


def test_truncation_and_padding_in_a_given_file_do_not_cut_text(tmp_path: Path) -> None:
    definition = json.loads(DEFINITION)
    definition["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    assert Tokenizer(json.dumps(definition), "test").encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the tokenizer .*missing.json"),
        (b"\xff\xfe", "cannot read the tokenizer"),
        (b"{}", "is not a tokenizer.json"),
        (b"not json", "is not a tokenizer.json"),
        (DEFINITION.replace(END_OF_TEXT, "<other>").encode(), "no token that ends a text"),
    ],
)
def test_files_that_do_not_serve_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "missing.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        Tokenizer.load(path)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'paceline\[text\]'"):
        train(TEXTS, 300)
