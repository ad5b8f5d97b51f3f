"""`paceline checkpoint`: what checkpoints hold, whether they are whole, and what to keep of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.arguments import CheckpointArguments
from paceline.checkpoint.exchange.export import export
from paceline.checkpoint.exchange.imports import import_checkpoint
from paceline.checkpoint.folder import checkpoints_in, folder_of, prune, read_manifest
from paceline.checkpoint.manifest import ITEM_BYTES, DamagedError, Manifest
from paceline.checkpoint.reader import Reader
from paceline.command_line import json_file
from paceline.command_line.parse import parse
from paceline.launch.screen import show

_OUT = {"safetensors": "model.safetensors", "huggingface": "huggingface", "torch": "checkpoint.pt"}
"""What is written where --out is not given."""
TELL_SECONDS = 5.0
"""Reading says so often how far it has come."""


def main(arguments: Sequence[str]) -> int:
    """Does what the command line says; returns the exit status: 1 where one is damaged.

    Raises:
        UserError: There is no checkpoint, or what is to be written is there already.
    """
    given = parse(CheckpointArguments, arguments, "paceline checkpoint")
    if given.action == "import":
        json_file.write(given.json, {"checkpoints": [_import(given)]})
        return 0
    parent = folder_of(given.path)
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
    """Writes one checkpoint as others read it."""
    out = Path(given.out or _OUT[given.format]).expanduser()
    manifest = read_manifest(path)
    export(path, manifest, out, given.format)
    _say(given, f"{out}: step {manifest.step:,} of {path}")
    return _facts(path, manifest) | {"out": str(out)}


def _import(given: CheckpointArguments) -> dict[str, Any]:
    """Makes a checkpoint of what others wrote."""
    out = Path(given.out).expanduser()
    _say(given, *import_checkpoint(Path(given.path).expanduser(), out, given.optimizer, given.trust))
    return _facts(out, read_manifest(out))
