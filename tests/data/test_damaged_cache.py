"""Cache entries that are not what was written are named and made anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.data import corpus as corpus_module
from paceline.data import prepare
from paceline.data.checksums import BLOCK, Blocks, block_count, checksums
from paceline.data.loader import Loader
from tests.data.caches import Configure, entries

FILES = "train.bin", "validation.bin", "tokenizer.json", "facts.json", "checksums.bin"


def flip(path: Path, at: int) -> None:
    """Turns one bit over, as a disk may."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncate", "remove", "flip"])
def test_damaged_entries_are_named_and_rebuilt(folder: Path, configure: Configure, name: str, damage: str) -> None:
    config = configure(folder)
    corpus = prepare(config)
    whole = entries(config.cache_folder)
    mapped = corpus.train.tokens.copy()
    path = corpus.folder / name
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "flip":
        flip(path, path.stat().st_size // 2)
    else:
        path.unlink()
    lines: list[str] = []
    assert np.array_equal(prepare(config, report=lines.append).train.tokens, mapped)
    assert entries(config.cache_folder) == whole
    told = [line for line in lines if f"{corpus.folder} is damaged" in line]
    assert len(told) == 1 and "prepared anew" in told[0] and "\n" not in told[0]


def test_damage_that_is_met_in_a_run_ends_it_and_is_mended_by_the_next(
    folder: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "CHECKED_AT_ONCE", 0)
    config = configure(folder)
    whole = prepare(config)
    tokens = whole.train.tokens.copy()
    flip(whole.folder / "train.bin", 999)
    opened = prepare(config)
    with (
        pytest.raises(UserError, match=r"train.bin is damaged: from byte 0 on.* Start again"),
        Loader(opened.train, context=8, batch_size=2, micro_batch=2) as loader,
    ):
        for _ in range(len(tokens)):
            next(loader)
    assert np.array_equal(prepare(config).train.tokens, tokens)


def test_only_what_is_used_is_checked_and_only_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * (3 * BLOCK + 5))
    sums = checksums(path)
    assert len(sums) == block_count(path.stat().st_size) == 4
    flip(path, 2 * BLOCK + 7)
    data = np.fromfile(path, np.uint8)
    blocks = Blocks(data, sums)
    assert blocks.damaged(0, 2 * BLOCK) is None
    assert blocks.damaged(3 * BLOCK, 3 * BLOCK + 5) is None
    assert blocks.damaged(BLOCK, 2 * BLOCK + 1) == 2 * BLOCK
    data[0] = 0
    assert blocks.damaged(0, 1) is None


def test_a_cache_that_vanishes_leaves_an_open_corpus_whole(folder: Path, configure: Configure) -> None:
    config = configure(folder)
    corpus = prepare(config)
    definition = corpus.tokenizer.read_text(encoding="utf-8")
    shutil.rmtree(config.cache_folder)
    corpus.train.check(0, len(corpus.train))
    assert corpus.definition == definition
