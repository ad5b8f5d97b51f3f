"""Shapes of models that tables name without describing them, and the shape that a row's columns describe. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.core.errors import UserError
from paceline.models.config import ModelConfig
from paceline.models.flops import parameter_count
from paceline.models.presets import PRESETS, llama
from paceline.plan.published.stacks import OWN
from paceline.plan.published.table import Row

CONTEXT = 2048
"""Tokens of a sequence where nothing says how many."""
FEWEST = 10_000
"""Parameters of a model: less is in another unit."""


def _gpt(layers: int, width: int, heads: int, vocabulary: int = 50304) -> ModelConfig:
    """GPT-3's architecture; the vocabulary is GPT-2's, padded."""
    return ModelConfig(layers=layers, width=width, heads=heads, context=CONTEXT, vocabulary=vocabulary)


def _mpt(layers: int, width: int, heads: int) -> ModelConfig:
    return replace(_gpt(layers, width, heads, 50368), bias=False)


def _llama(
    layers: int, width: int, heads: int, ff: int, kv_heads: int = 0, vocabulary: int = 32000, tied: bool = False
) -> ModelConfig:
    """Llama 1's or 2's, of 4,096 tokens as is usual, or 8,192 with another vocabulary."""
    context = 4096 if vocabulary == 32000 else 8192
    return llama(layers, width, heads, kv_heads, ff, context, vocabulary, tied, rope_theta=10_000.0)


def _nanotron(layers: int, width: int, heads: int, ff: int, tied: bool = False) -> ModelConfig:
    """Llama's architecture with as many key and value heads as heads, as the Ultra-Scale Playbook benchmarks it."""
    return _llama(layers, width, heads, ff, vocabulary=131_072, tied=tied)


_NANOTRON = {
    "1.34b": _nanotron(16, 2048, 32, 8192, tied=True),
    "3.57b": _nanotron(28, 3072, 24, 8192, tied=True),
    "8.86b": _nanotron(32, 4096, 32, 14336),
    "80b": _nanotron(80, 8192, 64, 28672),
}
_LLAMA1 = {"7b": _llama(32, 4096, 32, 11008), "13b": _llama(40, 5120, 40, 13824), "65b": _llama(80, 8192, 64, 22016)}
_LLAMA1 |= {"30b": _llama(60, 6656, 52, 17920), "33b": _llama(60, 6656, 52, 17920)}

FAMILIES: dict[str, dict[str, ModelConfig]] = {
    "mpt": {
        "125m": _mpt(12, 768, 12),
        "350m": _mpt(24, 1024, 16),
        "760m": _mpt(24, 1536, 12),
        "1b": _mpt(24, 2048, 16),
        "3b": _mpt(32, 2560, 20),
        "7b": _mpt(32, 4096, 32),
        "13b": _mpt(40, 5120, 40),
        "30b": _mpt(48, 7168, 56),
        "70b": _mpt(80, 8192, 64),
    },
    # Brown et al. 2020, table 2.1; Narayanan et al. 2021, table 1; NeMo's and Megatron's recipes.
    "gpt": {
        "125m": _gpt(12, 768, 12),
        "126m": _gpt(12, 768, 12),
        "350m": _gpt(24, 1024, 16),
        "357m": _gpt(24, 1024, 16),
        "760m": _gpt(24, 1536, 16),
        "1.3b": _gpt(24, 2048, 16),
        "1.7b": _gpt(24, 2304, 24, 51200),
        "2.7b": _gpt(32, 2560, 32),
        "3.6b": _gpt(30, 3072, 32, 51200),
        "5b": _gpt(24, 4096, 32),
        "6.7b": _gpt(32, 4096, 32),
        "7.5b": _gpt(36, 4096, 32, 51200),
        "13b": _gpt(40, 5120, 40),
        "18.4b": _gpt(40, 6144, 48, 51200),
        "20b": _gpt(44, 6144, 48),
        "39.1b": _gpt(48, 8192, 64, 51200),
        "76.1b": _gpt(60, 10240, 80, 51200),
        "145.6b": _gpt(80, 12288, 96, 51200),
        "175b": _gpt(96, 12288, 96, 51200),
        "310.1b": _gpt(96, 16384, 128, 51200),
        "529.6b": _gpt(105, 20480, 128, 51200),
        "1008b": _gpt(128, 25600, 160, 51200),
        "1t": _gpt(128, 25600, 160, 51200),
    },
    "llama1": _LLAMA1,
    "llama2": {
        **_LLAMA1,
        "34b": _llama(48, 8192, 64, 22016, kv_heads=8),
        "70b": _llama(80, 8192, 64, 28672, kv_heads=8),
    },
    "llama3": {
        "1b": _llama(16, 2048, 32, 8192, 8, 128_256, tied=True),
        "3b": _llama(28, 3072, 24, 8192, 8, 128_256, tied=True),
        "8b": _llama(32, 4096, 32, 14336, 8, 128_256),
        "70b": _llama(80, 8192, 64, 28672, 8, 128_256),
        "405b": _llama(126, 16384, 128, 53248, 8, 128_256),
    },
    # Parmar et al. 2024 and NeMo's recipes: squared ReLU between two projections, rotary, no biases.
    "nemotron": {
        "8b": replace(_gpt(32, 4096, 32, 256_000), ff=16384, position="rotary", bias=False, tied=False),
        "15b": replace(_gpt(32, 6144, 48, 256_000), kv_heads=8, position="rotary", bias=False, tied=False),
        "22b": replace(_gpt(40, 6144, 48, 256_000), position="rotary", bias=False, tied=False),
        "340b": replace(_gpt(96, 18432, 96, 256_000), kv_heads=8, position="rotary", bias=False, tied=False),
    },
    "nanotron": _NANOTRON | {"1b": _NANOTRON["1.34b"], "3b": _NANOTRON["3.57b"], "8b": _NANOTRON["8.86b"]},
    "mistral": {"7b": _llama(32, 4096, 32, 14336, 8)},
}
"""By family and size."""

_FAMILY_WORDS: tuple[tuple[str, str], ...] = (
    (r"llama[ _-]*v?3", "llama3"),
    (r"code[ _-]*llama|llama[ _-]*v?2", "llama2"),
    (r"nanotron|ultra[ -]?scale", "nanotron"),
    (r"torchtitan", "llama3"),
    (r"fms[ _-]*fsdp|foundation-model-stack|maximizing-training|\bibm\b", "llama2"),
    (r"llama", "llama2"),
    (r"nemotron", "nemotron"),
    (r"mistral", "mistral"),
    (r"mpt|llm-foundry|mosaicml", "mpt"),
    (r"gpt|megatron", "gpt"),
)
_GATED = frozenset({"llama1", "llama2", "llama3", "mistral", "nanotron"})


def family(row: Row) -> str:
    """The family of models that a row's name, table or source speaks of; "" for none that is known."""
    for text in (row.text("model"), row.text("table"), row.text("source")):
        for pattern, name in _FAMILY_WORDS:
            if re.search(pattern, text):
                return name
    return ""


def shape(row: Row) -> tuple[ModelConfig, str]:
    """The model that a row was measured with, and what had to be assumed of it.

    Columns say its sizes; what they leave out is that of the model that the row names.

    Raises:
        UserError: Neither does.
    """
    of_experts = r"mixtral|moe|\d+x\d+b|deepseek[ _-]?v[2-9]|gpt[ _-]?oss|[ _-]a\d+b"
    dense = ("", "0", "1", "false", "none", "dense")
    if any(row.text(name) not in dense for name in ("experts", "ep")) or re.search(of_experts, row.text("model")):
        raise UserError("a model of experts: only dense Transformers are predicted")
    if other := re.search(
        r"(?<![a-z])(t5|bert|vit|clip|diffusion|dit|neva|llava|whisper|mamba|retro|flux)", row.text("model")
    ):
        raise UserError(f"a model with {other[1]!r} in its name: only decoders are predicted")
    if (count := row.number("n_params")) is not None and count < FEWEST:
        raise UserError(
            f"n_params: expected a number of parameters, got {row.values['n_params']!r}; write billions as 8B, or say "
            "the unit in the column's name, as in n_params_b"
        )
    named, kind = _named(row), family(row)
    width, layers = row.whole("width"), row.whole("layers")
    if named is None and (width is None or layers is None):
        return _by_parameters(row)
    assumed = []
    if named is not None and width is None and not family(row) and row.text("model") not in PRESETS:
        assumed.append(f"the shape of {_of_size(_size(row))} of that size")
    base = named or _unnamed(row, kind, width or 0, layers or 0)
    width, layers = width or base.width, layers or base.layers
    if named is not None:
        others = (("width", width, base.width), ("layers", layers, base.layers))
        assumed += [
            f"{row.called[n]} {said} where {row.text('model')} has {its}" for n, said, its in others if said != its
        ]
    heads = row.whole("heads") or (base.heads if width == base.width else max(1, width // 128))
    kv_heads = row.whole("kv_heads") or (base.kv_heads if heads == base.heads else 0)
    vocabulary = row.whole("vocabulary") or base.vocabulary
    if named is None and row.whole("vocabulary") is None:
        assumed.append(f"a vocabulary of {vocabulary:,}")
    changes: dict[str, object] = {}
    ff = row.whole("ff")
    ratio = row.number("expansion")
    if ff is None and ratio:
        ff = round(ratio * width)
    if ff is None and width != base.width:
        ff = base.ff and round(base.ff * width / base.width)
    if ff is not None:
        changes["ff"] = ff
    gated = row.flag("swiglu") if row.flag("swiglu") is not None else "glu" in row.text("activation") or None
    if gated is not None:
        changes["activation"] = "swiglu" if gated else "gelu"
    if row.text("position").startswith("ro"):
        changes["position"] = "rotary"
    if "rms" in row.text("norm"):
        changes["norm"] = "rmsnorm"
    if row.flag("no_bias"):
        changes["bias"] = False
    if row.flag("untied") is not None or row.flag("tied") is not None:
        changes["tied"] = not row.flag("untied") if row.flag("untied") is not None else row.flag("tied")
    context = row.whole("context") or base.context
    if row.whole("context") is None:
        assumed.append(f"sequences of {context:,} tokens")
    config = replace(
        base,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=vocabulary,
        context=context,
        **changes,  # type: ignore[arg-type]
    )
    return config, ", ".join(assumed)


def _named(row: Row) -> ModelConfig | None:
    told = row.text("source") + row.text("table")
    if row.text("model") in PRESETS and (not told or OWN in told):
        # A row of a user's own.
        return PRESETS[row.text("model")]
    size = _size(row)
    known = FAMILIES.get(family(row), {})
    if row.whole("width") is None and re.search(r"llama(?![ _-]*v?\d(?![\d.]*[ _-]?[mbt]))", row.text("model")):
        # Of no version: the second, or the third where that alone has the size.
        known = FAMILIES["llama3"] | known
    if not size and (parameters := row.number("n_params")):
        size = _nearest(parameters, known)
    if size in known:
        return known[size]
    # A table that names no family: a size that only one of them has, the newest first.
    if not family(row) and (other := _of_size(size)):
        return FAMILIES[other][size]
    return None


def _of_size(size: str) -> str:
    """The family that a size of no family's is taken from; "" for none."""
    return next((each for each in ("llama3", "llama2", "gpt", "mpt") if size in FAMILIES[each]), "")


def _size(row: Row) -> str:
    """What a model's name says of its size, such as "8b"; "" for nothing."""
    found = re.search(r"(?<![\d.])(\d+(?:\.\d+)?) ?(m|b|t)(?![a-z0-9])", re.sub(r"[-_ ]+", " ", row.text("model")))
    return f"{found[1].removesuffix('.0')}{found[2]}" if found else ""


def _nearest(parameters: float, known: dict[str, ModelConfig]) -> str:
    """The size whose parameters are within 5 % of a number."""
    for size, config in known.items():
        if abs(parameter_count(config) / parameters - 1) < 0.05:
            return size
    return ""


def _unnamed(row: Row, kind: str, width: int, layers: int) -> ModelConfig:
    """A model of which only columns tell: GPT's architecture or Llama's, whichever has the row's parameters."""
    heads = row.whole("heads") or max(1, width // 128)
    if width % heads:
        raise UserError(f"expected a width that is a multiple of heads, got {width} with {heads}")
    gpt = ModelConfig(layers=layers, width=width, heads=heads, context=CONTEXT, vocabulary=50304)
    # Llama's inner width is 8/3 of the stream's, in multiples of 256.
    llama = _llama(layers, width, heads, -(-8 * width // 768) * 256, vocabulary=128_256 if kind == "llama3" else 32000)
    if kind in _GATED:
        return llama
    wanted = row.number("n_params")
    if not wanted or kind:
        return gpt
    sized = [replace(each, vocabulary=row.whole("vocabulary") or each.vocabulary) for each in (gpt, llama)]
    return min(sized, key=lambda each: abs(parameter_count(each) / wanted - 1))


def _by_parameters(row: Row) -> tuple[ModelConfig, str]:
    """A model of which only the number of parameters is known: 12 L h^2 of them, 128 times as wide as deep."""
    wanted = row.number("n_params")
    if wanted is None:
        size = _size(row)
        wanted = float(size[:-1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[size[-1]] if size else None
    if wanted is None:
        named = f"model {row.values['model']!r} is not known, and " if "model" in row.values else ""
        raise UserError(f"{named}neither d_model and n_layers nor a number of parameters tell its shape")
    width = max(128, round((wanted * 128 / 12) ** (1 / 3) / 128) * 128)
    layers = max(1, round(wanted / (12 * width**2)))
    context = row.whole("context") or CONTEXT
    base = ModelConfig(layers=layers, width=width, heads=width // 128, context=context, vocabulary=50304)
    if family(row) in _GATED:
        base = replace(_llama(layers, width, width // 128, -(-8 * width // 768) * 256), context=context)
    if row.whole("vocabulary"):
        base = replace(base, vocabulary=row.whole("vocabulary") or base.vocabulary)
    return base, f"{layers} layers of width {width} for {wanted:.3g} parameters"
