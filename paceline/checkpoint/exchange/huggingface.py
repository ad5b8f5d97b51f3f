"""Folders that Hugging Face's transformers load: written from a checkpoint, and read to make one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.exchange.huggingface_config import from_huggingface, to_huggingface
from paceline.checkpoint.exchange.huggingface_weights import PREFIX, UNUSED, Link, links
from paceline.checkpoint.exchange.tensor_file import DTYPES, Lazy, write_tensors
from paceline.checkpoint.manifest import Stored
from paceline.checkpoint.reader import Reader
from paceline.core.errors import UserError
from paceline.data.tokenizer import Tokenizer
from paceline.materialise.stored_weights import StoredWeights
from paceline.models.config import ModelConfig
from paceline.models.on_meta import on_meta
from paceline.models.transformer import Transformer

SHARD_BYTES = 5_000_000_000
"""Weights of more bytes are written to several files, as transformers does."""
TOKENIZER = "tokenizer.json"

_FLOATS = {DTYPES[dtype]: dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


# ---- written


def write_huggingface(
    folder: Path,
    config: ModelConfig,
    stored: Mapping[str, Stored],
    reader: Reader,
    tokenizer: Path | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes weights, config.json and tokenizer into a folder that is there.

    Args:
        folder: Empty.
        config: The model's shape.
        stored: The checkpoint's tensors.
        reader: Of them.
        tokenizer: A tokenizer.json; None for none.
        shard_bytes: How large a file of weights may be, unless it holds one tensor.

    Raises:
        UserError: The model is of no family of Hugging Face's, or the checkpoint is not of this model.
        OSError: Something cannot be written.
    """
    linked = list(links(config))
    wanted = _shapes(config)
    for name, shape in wanted.items():
        held = stored.get(f"model/{name}")
        if held is None or held.shape != shape:
            there = "is not there" if held is None else f"is {list(held.shape)}"
            raise UserError(f"{name} should be {list(shape)} by the model's shape and {there}: it is another model's")
    tensors = [tensor for link in linked for tensor in _theirs(link, stored[f"model/{link.ours}"], reader)]
    _write_shards(folder, tensors, shard_bytes)
    end = None if tokenizer is None else _write_tokenizer(folder, tokenizer, config.context)
    dtype = stored["model/embedding.weight"].dtype
    _write_json(folder / "config.json", to_huggingface(config, dtype, end))


def _theirs(link: Link, stored: Stored, reader: Reader) -> list[Lazy]:
    """The tensors that one of ours is for them."""
    columns, first, found = math.prod(stored.shape[1:]), 0, []
    for name, rows in link.theirs:
        shape = (rows or stored.shape[0], *stored.shape[1:])
        last = first + shape[0]
        read = partial(reader.read, f"model/{link.ours}", first * columns, last * columns)
        found.append(
            Lazy(
                name,
                getattr(torch, stored.dtype),
                shape[::-1] if link.transposed else shape,
                partial(_turned, read, shape, link.transposed),
            )
        )
        first = last
    return found


def _turned(read: Callable[[], Tensor], shape: tuple[int, ...], transposed: bool) -> Tensor:
    tensor = read().reshape(shape)
    return tensor.t() if transposed else tensor


def _write_shards(folder: Path, tensors: list[Lazy], shard_bytes: int) -> None:
    shards: list[list[Lazy]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(each.nbytes for each in shards[-1]) + tensor.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        write_tensors(folder / "model.safetensors", tensors)
        return
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard)
        file_of |= {tensor.name: file for tensor in shard}
    total = sum(tensor.nbytes for tensor in tensors)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": file_of})


def _write_tokenizer(folder: Path, tokenizer: Path, context: int) -> int:
    """Writes what `AutoTokenizer` needs; returns the token that ends a text."""
    known = Tokenizer.load(tokenizer)
    (folder / TOKENIZER).write_bytes(tokenizer.read_bytes())
    end = known.decode([known.end_of_text])
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end,
            "eos_token": end,
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
    )
    return known.end_of_text


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ---- read


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model in a folder, of which only headers were read.

    Attributes:
        config: Its shape.
        tensors: Its parameters under our names.
        tokenizer: Its tokenizer.json; None without.
    """

    config: ModelConfig
    tensors: list[Lazy]
    tokenizer: Path | None


def read_huggingface(folder: Path) -> HuggingFaceModel:
    """What a folder holds that transformers' `save_pretrained` wrote. No code of it is run.

    Raises:
        UserError: It is of another architecture, damaged or incomplete; says what.
    """
    try:
        config = from_huggingface((folder / "config.json").read_bytes())
    except (OSError, UserError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{folder / 'config.json'}: {said}") from None
    if not any(folder.glob("*.safetensors*")):
        raise UserError(
            f"{folder} holds no *.safetensors: files named *.bin are pickles, which may run code; let transformers "
            "write the model anew, by model.save_pretrained(folder)"
        )
    weights = StoredWeights(folder)
    if config.layers > len(weights.shapes):
        # Counting up what so many layers should hold would take for ever.
        raise UserError(
            f"{folder}: config.json says {config.layers:,} layers, there are {len(weights.shapes):,} tensors"
        )
    tokenizer = folder / TOKENIZER
    tensors = _linked(folder, config, weights)
    return HuggingFaceModel(config, tensors, tokenizer if tokenizer.is_file() else None)


def _linked(folder: Path, config: ModelConfig, weights: StoredWeights) -> list[Lazy]:
    """Our parameters, each made of theirs.

    Raises:
        UserError: Some are missing, too many, or of other shapes or dtypes.
    """
    linked, ours = list(links(config)), _shapes(config)
    prefix = next(each for each in PREFIX.values() if linked[0].theirs[0][0].startswith(each))
    spelled = {
        name: name if any(each.startswith(prefix) for each in weights.shapes) else name.removeprefix(prefix)
        for link in linked
        for name, _ in link.theirs
    }
    wanted = [
        ((spelled[name],), _shape_there(ours[link.ours], rows, link.transposed))
        for link in linked
        for name, rows in link.theirs
    ]
    tied = config.tied and "lm_head.weight" in weights.shapes
    if tied:
        wanted.append((("lm_head.weight",), ours["embedding.weight"]))
    unused = {name for name in weights.shapes if re.fullmatch(UNUSED, f".{name}")}
    wanted += [((name,), weights.shapes[name]) for name in unused]
    weights.require_fit(wanted)
    if tied and not torch.equal(weights.read("lm_head.weight"), weights.read(spelled[linked[0].theirs[0][0]])):
        raise UserError(f"{folder}: config.json ties lm_head.weight to the embedding, but they differ in the files")
    return [_ours(link, ours[link.ours], spelled, weights) for link in linked]


def _ours(link: Link, shape: tuple[int, ...], spelled: Mapping[str, str], weights: StoredWeights) -> Lazy:
    names = [spelled[name] for name, _ in link.theirs]
    kinds = {weights.dtype(name) for name in names}
    if len(kinds) > 1 or not kinds <= _FLOATS.keys():
        raise UserError(f"weights: {', '.join(names)}: expected one of {', '.join(_FLOATS)}, got {', '.join(kinds)}")

    def read() -> Tensor:
        parts = [weights.read(name) for name in names]
        return parts[0].t() if link.transposed else torch.cat(parts) if len(parts) > 1 else parts[0]

    return Lazy(link.ours, _FLOATS[kinds.pop()], shape, read)


def _shape_there(shape: tuple[int, ...], rows: int, transposed: bool) -> tuple[int, ...]:
    if transposed:
        return shape[::-1]
    return (rows or shape[0], *shape[1:])


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of a model, by name, each once."""
    model = on_meta(lambda: Transformer(config))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
