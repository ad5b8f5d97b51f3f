"""How a row's run shares and computes: sharding, recomputation and precision in the words of several programs. Pure."""

from __future__ import annotations

import re

from paceline.core.errors import UserError
from paceline.models.config import ModelConfig
from paceline.plan.published.table import Row
from paceline.plan.run import Recompute

_OFF = ("false", "no", "none", "off", "0", "0.0", "-", "disabled")

_WORDS = {
    "sharding": r"shard|ddp|hsdp|fsdp|hybrid|grad_op|zero(?![ _-]*(stage)?[ _-]*[4-9])|optim|\b[0-3]\b",
    "precision": r"bf16|bfloat16|(fp|float)(8|16|32)|tf32|half|amp|mixed|\b(8|16|32)\b",
    "recompute": r"full|selective|block|uniform|layer|unit|all|op|sac|true|yes|\bon\b|\d",
    "optimizer": r"adam",
    "offload": r"=none",
}
"""What names each setting in one of the programs, of those that are predicted."""

_FLAGS = ("compile", "seq_parallel", "overlap_grad", "async_tp", "dist_opt", "swiglu", "untied", "tied", "no_bias")
"""What is on or off."""


def unread(row: Row) -> list[str]:
    """Settings in words that none of the programs uses, or that are not predicted: for these the usual is assumed."""
    told = {name: row.text(name) for name in _WORDS}
    others = [name for name, text in told.items() if text and text not in _OFF and not re.search(_WORDS[name], text)]
    others += [name for name in _FLAGS if row.text(name) and row.flag(name) is None]
    return [f"{name} {row.text(name)!r} is not predicted, the usual assumed" for name in others]


def sharding(row: Row, stack: str, devices: int, per_host: int) -> tuple[int, int]:
    """What data-parallel ranks shard, and over how many of them; 0 for all."""
    text = " ".join((row.text("sharding"), row.text("parallelism")))
    replicas = row.whole("dp_replicate") or 1
    degree = row.text("dp_shard")
    # NeMo's tables write FSDP 0 for none, and how many ranks share parameters where they do.
    shard = row.whole("dp_shard") or 0 if degree.isdecimal() and row.number("dp_shard") else 0
    text += f" {degree}"
    if row.text("sharding") in _OFF or "no_shard" in text or re.search(r"\bddp\b", text):
        return 0, 0
    if "hybrid" in text or "hsdp" in text or replicas > 1:
        return 3, shard or min(per_host, devices)
    if "grad_op" in text or re.search(r"zero[ _-]?2|\b2\b", row.text("sharding")):
        return 2, shard
    if "full_shard" in text or "fsdp" in text or re.search(r"zero[ _-]?3|\b3\b", row.text("sharding")):
        return 3, shard
    if shard > 1 and stack == "nemo":
        return 3, shard
    if re.search(r"zero[ _-]?1|\b1\b", row.text("sharding")) or row.flag("dist_opt"):
        return 1, shard
    if re.search(r"zero[ _-]?0|\b0\b", row.text("sharding")):
        return 0, 0
    default = {"composer": 3, "torchtitan": 3, "fsdp": 3, "fms": 3, "nanotron": 1, "nemo": 1, "megatron": 1}
    return default.get(stack, 0), shard


def recompute(row: Row, stack: str, config: ModelConfig) -> tuple[Recompute, float, str]:
    """What a row's run computes again in backward, in which share of the blocks, and what was assumed of that."""
    text = row.text("recompute")
    if not text:
        if stack == "megatron_2021":
            return "unit", 1.0, "everything recomputed, as in that paper's runs"
        if stack == "torchtitan":
            # Its configurations of Llama 3: 8B selectively, 70B and 405B in full.
            if config.layers * config.width**2 > 80 * 5120**2:
                return "unit", 1.0, "everything recomputed, as torchtitan's configurations of large models do"
            return "operations", 1.0, "selective recomputation, as torchtitan's configurations of small models do"
        return "none", 1.0, ""
    if text in _OFF:
        return "none", 1.0, ""
    fraction = re.search(r"(?:(\d+)\s*/\s*(\d+))|(0?\.\d+)", text)
    if fraction:
        share = float(fraction[3]) if fraction[3] else int(fraction[1]) / int(fraction[2])
        return "unit", min(1.0, share), ""
    if re.search(r"selective|\bsac\b|\bop\b", text):
        every = re.search(r"(?:layer|every)[ _-]*(\d+)|(\d+)[ _-]*layer|selective[ _,-]*(\d+)", text)
        if every:
            return "unit", 1 / int(every[1] or every[2] or every[3]), ""
        if stack == "fms":
            # Its ac_handler computes every n-th block again; published figures of HFU over MFU give n = 2.
            return "unit", 0.5, "every second block recomputed"
        return ("operations" if stack in ("torchtitan", "fsdp") else "attention"), 1.0, ""
    if row.text("recompute_method") == "block" and (number := row.whole("recompute_layers")):
        return "unit", min(1.0, number / config.layers), ""
    return "unit", 1.0, ""


def precision(row: Row, stack: str) -> tuple[str, int, int]:
    """What matmuls compute in, and bytes of parameters gathered and of gradients reduced."""
    tells = {"precision", "fp8", "bf16", "fp16"} & row.values.keys()
    text = " ".join((row.text("precision"), row.text("mode"), "" if tells else row.text("table")))
    eight = row.text("fp8") not in ("", "false", "none", "no", "off", "0") or re.search(
        r"fp8|float8|mxfp8", text + " " + row.text("parallelism")
    )
    if re.search(r"fp4", text):
        raise UserError(f"precision: expected 8 bits or more, got {row.values.get('precision')!r}")
    told = row.text("precision")
    half = re.search(r"fp16|float16|^half|^16-(mixed|true)", text.replace("bfloat16", ""))
    dtype = "float16" if row.flag("fp16") or half else "bfloat16"
    if eight:
        dtype = "float8"
    if re.fullmatch(r"\s*(fp32|float32|tf32|32(-true)?)\s*", told or text):
        dtype = "tf32" if "tf32" in text else "float32"
    wide = 4 if dtype in ("float32", "tf32") else 2
    if stack == "composer" or "pure" in text:
        return dtype, wide, 2 if "pure" in text else COMPOSER_REDUCED
    if stack in ("megatron_deepspeed", "megatron_2021", "fms"):
        # fms-fsdp's policy bfSixteen reduces in what it computes in.
        return dtype, wide, 2
    return dtype, wide, 4


COMPOSER_REDUCED = 4
"""Bytes of a gradient as Composer's mode DEFAULT reduces it: gathers in 16 bits, reductions in 32. The mode meant three
things in its versions, and reductions in 16 bits would fit as well."""
