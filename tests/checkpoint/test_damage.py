"""What is not what was written is never loaded: it is named, and the checkpoint before it taken."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import unittest.mock
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.checkpoint.manifest import DamagedError
from paceline.core.strategy import Strategy
from tests.checkpoint.two_saved import loaded, parallel, refused, step, two_saved
from tests.engine.models import assert_same, snapshot


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def hole(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-900:-100] = bytes(800)
    path.write_bytes(data)


RANK, MANIFEST = "rank-00001.safetensors", "manifest.json"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (lambda path: flip(path / RANK, -50), f"{RANK} cannot be read: the checksum of"),
    "a hole of zeros": (lambda path: hole(path / RANK), f"{RANK} cannot be read: the checksum of"),
    "a truncated file": (lambda path: os.truncate(path / RANK, 700), f"{RANK} cannot be read"),
    "an empty file": (lambda path: os.truncate(path / RANK, 0), f"{RANK} cannot be read"),
    "a missing file": (lambda path: (path / RANK).unlink(), RANK),
    "a flipped bit in a header": (
        lambda path: flip(path / RANK, (path / RANK).read_bytes().index(b"model/")),
        f"{RANK} cannot",
    ),
    "a flipped bit in the manifest": (lambda path: flip(path / MANIFEST, 300), MANIFEST),
    "half a manifest": (lambda path: os.truncate(path / MANIFEST, 1500), MANIFEST),
    "a file of other weights": (
        lambda path: shutil.copy(path.with_name("step-00000001") / RANK, path / RANK) and None,
        f"{RANK} cannot be read: the checksum of",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_checkpoint_before_is_taken_and_the_damage_named(ranks, tmp_path: Path, kind: str) -> None:
    damage, words = DAMAGE[kind]
    (expected, *_) = ranks(2, two_saved, tmp_path)
    damage(tmp_path / "step-00000002")
    for rank, (number, state, told) in enumerate(ranks(2, loaded, tmp_path)):
        assert number == 1
        assert_same(state, expected, atol=0)
        assert any(words in message and "step-00000001, which is older" in message for message in told) == (rank == 0)
    # By its own name it is refused, on every rank alike, also on those that read no damaged byte.
    for message in ranks(2, refused, tmp_path / "step-00000002"):
        assert words in message


def half_loaded(folder: Path) -> list[str]:
    """What is refused after a load that found damage on the way, and that nothing is after one that did not."""
    model, optimizer = parallel(seed=1)
    with contextlib.suppress(pl.UserError):
        pl.load(folder / "step-00000002", model, optimizer)
    calls: list[Callable[[], object]] = [
        lambda: step(model, optimizer),
        lambda: model[0](torch.ones(2, 16)),
        optimizer.step,
        lambda: pl.save(folder / "step-00000003", model, optimizer, step=3),
        lambda: pl.check_replicas(model, optimizer),
    ]
    told = []
    for call in calls:
        with pytest.raises(pl.EngineError) as caught:
            call()
        told.append(str(caught.value))
    assert pl.load(folder / "step-00000001", model, optimizer).step == 1
    step(model, optimizer)
    return told


def test_weights_that_are_partly_a_checkpoints_are_not_used(ranks, tmp_path: Path) -> None:
    ranks(2, two_saved, tmp_path)
    flip(tmp_path / "step-00000002" / RANK, -50)
    for told in ranks(2, half_loaded, tmp_path):
        assert all("after a pl.load that failed half way" in message for message in told)


def found_without_memory(folder: Path) -> list[str]:
    """What loads say that lack something else than a whole file."""
    model, optimizer = parallel(seed=1)
    opens, told = os.open, []

    def lacking(number: int) -> Callable[..., int]:
        def opened(path: Any, *rest: Any) -> int:
            if str(path).endswith(".safetensors"):
                raise OSError(number, os.strerror(number), str(path))
            return opens(path, *rest)

        return opened

    for number in (errno.ENOMEM, errno.EMFILE, errno.EACCES):
        with unittest.mock.patch("os.open", lacking(number)), pytest.raises(pl.UserError) as caught:
            pl.load(folder, model, optimizer)
        told.append(str(caught.value))
    with (
        unittest.mock.patch("os.preadv", side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")),
        pytest.raises(pl.UserError) as caught,
    ):
        pl.load(folder, model, optimizer)
    return [*told, str(caught.value)]


def test_no_older_checkpoint_is_taken_where_this_rank_lacks_something(ranks, tmp_path: Path) -> None:
    ranks(2, two_saved, tmp_path)
    for told in ranks(2, found_without_memory, tmp_path):
        assert all("cannot be opened" in message and "step-00000002" in message for message in told[:3])
        assert "not enough memory to load the checkpoint" in told[3]


HEADERS = {
    "no text": b"\xff\xfe" * 8,
    "nested": b"[" * 200_000,
    "huge offsets": json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 10**30]}}).encode(),
    "no tensors": b"{}",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_hostile_header_is_damage_that_names_its_file(tmp_path: Path, kind: str) -> None:
    two_saved(tmp_path)
    file = tmp_path / "step-00000002" / "rank-00000.safetensors"
    file.write_bytes(len(HEADERS[kind]).to_bytes(8, "little") + HEADERS[kind] + bytes(900))
    model, optimizer = parallel(seed=1)
    with pytest.raises(DamagedError, match=r"rank-00000\.safetensors cannot be read"):
        pl.load(tmp_path / "step-00000002", model, optimizer)


def test_a_manifest_that_is_not_there_is_no_checkpoint(ranks, tmp_path: Path) -> None:
    ranks(2, two_saved, tmp_path)
    (tmp_path / "step-00000002" / MANIFEST).unlink()
    assert [number for number, *_ in ranks(2, loaded, tmp_path)] == [1, 1]
    shutil.rmtree(tmp_path / "step-00000001")
    for message in ranks(2, refused, tmp_path):
        assert "holds no complete checkpoint" in message


# ---- what a manifest may not say


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path": lambda m: m["tensors"]["model/0.weight"]["parts"][0].__setitem__(0, "../../etc/passwd"),
    "an absolute path": lambda m: m["tensors"]["model/0.weight"]["parts"][0].__setitem__(0, "/dev/zero"),
    "an overlap": lambda m: m["tensors"]["model/0.weight"]["parts"][0].__setitem__(2, 641),
    "a gap": lambda m: m["tensors"]["model/0.weight"]["parts"].pop(),
    "a huge shape": lambda m: m["tensors"]["model/0.weight"].__setitem__("shape", [10**12, 10**12]),
    "a negative shape": lambda m: m["tensors"]["model/0.weight"].__setitem__("shape", [-40, -16]),
    "no such dtype": lambda m: m["tensors"]["model/0.weight"].__setitem__("dtype", "load"),
    "another format": lambda m: m.__setitem__("format", "paceline checkpoint 99"),
    "a state too few": lambda m: m["ranks"].pop(),
    "no values": lambda m: m.__setitem__("values", {}),
    "a made-up kind": lambda m: m["values"].__setitem__("extra", {"$import": "os"}),
    "values of another type": lambda m: m["values"].__setitem__("optimizers", 3),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_manifest_that_lies_is_refused_before_anything_is_built_from_it(tmp_path: Path, kind: str) -> None:
    from paceline.checkpoint.manifest import _canonical

    two_saved(tmp_path)
    path = tmp_path / "step-00000002" / MANIFEST
    manifest = json.loads(path.read_text())["manifest"]
    HOSTILE[kind](manifest)
    body = _canonical(manifest)
    path.write_bytes(b'{"crc32":%d,"manifest":%s}' % (zlib.crc32(body), body))
    assert loaded(tmp_path)[0] == 1
    assert refused(path.parent)


def other_model(folder: Path) -> list[str]:
    torch.manual_seed(0)
    told = []
    for model in (
        nn.Sequential(nn.Linear(16, 41), nn.Linear(41, 3)),
        nn.Sequential(nn.Linear(16, 40), nn.Linear(40, 3), nn.Linear(3, 3)),
        nn.Sequential(nn.Linear(16, 40)),
    ):
        pl.parallelize(model, Strategy(zero=1))
        before = snapshot(model)
        with pytest.raises(pl.UserError) as caught:
            pl.load(folder, model, torch.optim.AdamW(model.parameters()))
        assert_same(snapshot(model), before, atol=0)
        told.append(str(caught.value))
    model, _ = parallel()
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.AdamW([{"params": [p]} for p in model.parameters()]),
        torch.optim.AdamW(list(model.parameters())[1:]),
    ):
        with pytest.raises(pl.UserError) as caught:
            pl.load(folder, model, optimizer)
        told.append(str(caught.value))
    return told


def test_another_model_or_optimizer_is_refused_with_what_differs(ranks, tmp_path: Path) -> None:
    ranks(2, two_saved, tmp_path)
    for told in ranks(2, other_model, tmp_path):
        words = (
            "0.weight [40, 16], now [41, 16]",
            "it lacks 2.weight, 2.bias",
            "only it has",
            "AdamW; pl.load was given SGD",
            "1 were saved, there are 4",
            "group 0 lacks ['0.weight']",
        )
        for message, expected in zip(told, words, strict=True):
            assert expected in message
