"""Manifests that are truncated, flipped, forged or hostile: what is taken is what was written, or makes sense."""

from __future__ import annotations

import contextlib
import copy
import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.checkpoint.folder import make_folder, read_manifest
from paceline.checkpoint.manifest import FORMAT, NAME, DamagedError, Manifest, Part, Stored, from_bytes, to_bytes
from paceline.checkpoint.reader import Reader
from paceline.checkpoint.writing import OwnPart, commit, write_part

PARTS = (Part("rank-00000.safetensors", 0, 5, (7,)), Part("rank-00001.safetensors", 5, 12, (9,)))
MANIFEST = Manifest(
    format=FORMAT,
    step=3,
    world_size=2,
    strategy={"zero": 3},
    versions={"torch": "2.13.0"},
    tensors={"model/weight": Stored("float32", (3, 4), PARTS), "model/empty": Stored("int64", (0, 2), ())},
    values={"extra": {"best": 1.5}},
    ranks=({"loader": None}, {"loader": None}),
)
DATA = to_bytes(MANIFEST)


def sealed(plain: Any) -> bytes:
    """As somebody would forge it: with the right checksum."""
    body = json.dumps(plain, separators=(",", ":")).encode()
    return b'{"crc32":%d,"manifest":%s}\n' % (zlib.crc32(body), body)


@given(st.integers(0, len(DATA) - 3))
def test_a_truncated_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError):
        from_bytes(DATA[:size])


@given(st.integers(0, 8 * len(DATA) - 1))
def test_a_flipped_bit_is_found_or_changes_nothing(bit: int) -> None:
    flipped = bytearray(DATA)
    flipped[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(ValueError):
        # White space between values is nobody's.
        assert from_bytes(bytes(flipped)) == MANIFEST


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from(["../../etc/passwd", "/etc/passwd", "rank-00000.safetensors/../x", "float32", "", "\0", "rank-1"]),
    st.lists(st.integers(-3, 2**63), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inside for found in places(item, (*path, key)))]


PLAIN = json.loads(json.dumps(msgspec.to_builtins(MANIFEST)))


@given(st.lists(st.tuples(st.sampled_from(places(PLAIN)[1:]), WRONG), min_size=1, max_size=3))
def test_a_forged_one_is_refused_or_makes_sense(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    plain = copy.deepcopy(PLAIN)
    for path, wrong in changes:
        inside = plain
        try:
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = wrong
        except (KeyError, IndexError, TypeError):
            # An earlier change has taken the place away.
            continue
    try:
        manifest = from_bytes(sealed(plain))
    except ValueError:
        return
    for stored in manifest.tensors.values():
        covered = [element for part in stored.parts for element in (part.start, part.stop)]
        # Each element once, in files of this folder, as many as the shape has.
        assert all(Path(part.file).name == part.file and part.file.startswith("rank-") for part in stored.parts)
        assert covered == sorted(covered) and covered[1:-1:2] == covered[2::2]
        assert (covered[0], covered[-1]) == (0, stored.numel) if covered else stored.numel == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("manifests") / "step-00000003"
    make_folder(path)
    for rank in range(2):
        part = OwnPart(rank)
        part.add("model/weight", 4 * rank, torch.arange(4.0) + 4 * rank, (8,))
        part.values = {"optimizers": [], **({"common": {}} if rank == 0 else {})}
        write_part(path, part)
    commit(path, 3, 2, {}, 0.0)
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    st.sampled_from(["rank-00000.safetensors", "rank-00001.safetensors", NAME]),
    st.sampled_from(["flip", "cut", "zero", "remove"]),
    st.floats(0, 1, exclude_max=True),
)
def test_what_is_read_from_damaged_files_is_what_was_written(folder: Path, name: str, how: str, where: float) -> None:
    before = (folder / name).read_bytes()
    at = int(where * len(before))
    if how == "remove":
        (folder / name).unlink()
    elif how == "cut":
        (folder / name).write_bytes(before[:at])
    elif how == "zero":
        (folder / name).write_bytes(before[:at].ljust(len(before), b"\0"))
    else:
        (folder / name).write_bytes(before[:at] + bytes([before[at] ^ 4]) + before[at + 1 :])
    try:
        manifest = read_manifest(folder)
        found = Reader(folder, manifest.tensors).read("model/weight")
    except DamagedError:
        pass
    else:
        assert torch.equal(found, torch.arange(8.0))
    finally:
        (folder / name).write_bytes(before)
