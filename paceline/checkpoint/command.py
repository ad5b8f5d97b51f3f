"""`paceline checkpoint`: what checkpoints hold, whether they are whole, and what to keep of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.arguments import CheckpointArguments
from paceline.checkpoint.folder import checkpoints_in, prune, read_manifest
from paceline.checkpoint.manifest import ITEM_BYTES, Manifest
from paceline.checkpoint.rank_file import DamagedError, Reader
from paceline.command_line import json_file
from paceline.command_line.parse import parse
from paceline.core.errors import UserError
from paceline.launch.screen import show

TELL_SECONDS = 5.0
"""Reading says so often how far it has come."""


def main(arguments: Sequence[str]) -> int:
    """Does what the command line says; returns the exit status: 1 where one is damaged.

    Raises:
        UserError: There is no checkpoint, or what is to be written is there already.
    """
    given = parse(CheckpointArguments, arguments, "paceline checkpoint")
    path = Path(given.path).expanduser()
    parent = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if given.action == "prune":
        gone = [str(each) for each in prune(parent, given.keep, given.keep_every)] if checkpoints_in(parent) else []
        json_file.write(given.json, {"removed": gone})
        _say(given, *(f"removed {each}" for each in gone), f"{len(checkpoints_in(parent))} left in {parent}")
        return 0
    found = checkpoints_in(parent)
    facts = [_export(given, found[0])] if given.action == "export" else [_looked_at(given, each) for each in found]
    json_file.write(given.json, {"checkpoints": facts})
    return int(any("damage" in one for one in facts))


def _say(given: CheckpointArguments, *lines: str) -> None:
    show(*lines, warning=given.json == json_file.SCREEN)


def _looked_at(given: CheckpointArguments, path: Path) -> dict[str, Any]:
    """What one checkpoint holds, and what is wrong with it."""
    try:
        manifest = read_manifest(path)
        facts = _facts(path, manifest)
        if given.action == "show":
            _say(given, *_lines(facts))
            return facts
        began = told = time.monotonic()
        reader, done = Reader(path, manifest.tensors), 0
        for name in manifest.tensors:
            for size in reader.verify(name):
                done += size
                if time.monotonic() - told > TELL_SECONDS:
                    told = time.monotonic()
                    _say(given, f"{path}: {100 * done / facts['bytes']:.0f} %")
        seconds = time.monotonic() - began
        _say(given, f"{path}: right, {done / 2**20:,.1f} MiB in {seconds:.1f} s")
        return facts | {"seconds": seconds}
    except DamagedError as error:
        _say(given, f"{path}: DAMAGED: {error}")
        return {"path": str(path), "damage": str(error)}


def _facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    weights = {name: stored for name, stored in manifest.tensors.items() if name.startswith("model/")}
    return {
        "path": str(path),
        "step": manifest.step,
        "ranks": manifest.world_size,
        "strategy": manifest.strategy,
        "versions": manifest.versions,
        "parameters_and_buffers": len(weights),
        "elements": sum(stored.numel for stored in weights.values()),
        "optimizers": [one["kind"] for one in manifest.values["optimizers"]],
        "bytes": sum(stored.numel * ITEM_BYTES[stored.dtype] for stored in manifest.tensors.values()),
    }


def _lines(facts: dict[str, Any]) -> list[str]:
    strategy = facts["strategy"]
    return [
        f"{facts['path']}: step {facts['step']:,}, {facts['bytes'] / 2**20:,.1f} MiB",
        f"  {facts['elements']:,} elements in {facts['parameters_and_buffers']} parameters and buffers; "
        f"{', '.join(facts['optimizers']) or 'no optimizer'}",
        f"  saved by {facts['ranks']} rank{'s' * (facts['ranks'] > 1)} at zero {strategy['zero']} in "
        f"{strategy['precision']}, paceline {facts['versions']['paceline']}, torch {facts['versions']['torch']}",
    ]


def _export(given: CheckpointArguments, path: Path) -> dict[str, Any]:
    """Writes the weights of one checkpoint under the names of the model's `state_dict`."""
    from safetensors.torch import save_file

    from paceline.checkpoint.rank_file import sync

    out = Path(given.out).expanduser()
    if out.exists():
        raise UserError(f"--out: {out} is there already: name a new file")
    manifest = read_manifest(path)
    reader = Reader(path, manifest.tensors)
    tensors = {
        name.removeprefix("model/"): reader.read(name).reshape(stored.shape)
        for name, stored in manifest.tensors.items()
        if name.startswith("model/")
    }
    temporary = out.with_name(f".{out.name}.new")
    try:
        temporary.touch()
        rights = temporary.stat().st_mode
        save_file(tensors, temporary, {"format": "pt"})
        temporary.chmod(rights)
        sync(temporary)
        temporary.replace(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}: choose another --out") from error
    finally:
        temporary.unlink(missing_ok=True)
    _say(given, f"{out}: the weights of step {manifest.step:,}, {len(tensors)} tensors")
    return _facts(path, manifest) | {"out": str(out)}
