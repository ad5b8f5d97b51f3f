"""From a row of Megatron-LM's golden memory values to the run that it describes, or the reason why not.

Columns are those of its functional tests' options. What the options leave out is in a test's name: whether blocks are
Megatron's own, hosts of four devices. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal

from paceline.core.errors import UserError
from paceline.models.config import ModelConfig
from paceline.plan.megatron import Megatron

VOCABULARY = 50257
"""Of the tokenizer that the functional tests' data was made with, GPT-2's."""

DIVISIBLE = 128
"""Megatron pads the vocabulary to a multiple of this times the tensor-parallel ranks."""

UNKNOWN = {
    "mla": "latent attention, whose ranks are in no column",
    "gdn": "gated delta networks in place of attention, whose shapes are in no column",
    "dsa": "sparse attention with an indexer, whose shapes are in no column",
    "distill": "a teacher beside the model, whose shape is in no column",
    "uneven_pipeline": "stages of unequal depth, which are in no column",
}
"""Words in tests' names that say what no option in a column does."""


def megatron_run(row: Mapping[str, str]) -> Megatron:
    """The run of a row.

    Raises:
        UserError: It leaves out what memory depends on, or is of a kind that is not predicted.
    """
    case = row.get("case", "").lower()
    for word, what in UNKNOWN.items():
        if re.search(rf"(^|_){word}(_|$)", case):
            raise UserError(f"case: {what}")
    if _whole(row, "experts"):
        raise UserError("experts: expected a dense model; experts are not predicted")
    if not row.get("global_batch") and not _flag(row, "mock_data") and "release" in case:
        raise UserError(
            "global_batch: expected a number; without it nothing says on how many hosts n_gpus counts one of, "
            "and optimizer states are divided among all"
        )
    tensor, pipeline, context_ranks = (_whole(row, name) or 1 for name in ("tp", "pp", "cp"))
    devices = _whole(row, "n_gpus") or (4 if case.endswith("1node") else 8)
    cut = tensor * pipeline
    if devices % (cut * context_ranks):
        raise UserError(f"n_gpus: expected a multiple of tp x pp x cp = {cut * context_ranks}, got {devices}")
    config = _config(row, tensor)
    fully = _flag(row, "megatron_fsdp") or _flag(row, "torch_fsdp2")
    shards = devices // cut if _flag(row, "dist_opt") or fully else 1
    if "multi_dist_optimizer_instances" in case:
        # Two copies of the optimizer's states.
        shards //= 2
    # Embedding and loss may count as a layer each where layers are dealt out.
    counts = "account_for_embedding_loss" in case
    stage = (config.layers + 2 * counts) // pipeline
    samples = _whole(row, "microbatch") or 1
    layers_each = _whole(row, "layers_per_virtual_stage")
    if "vp2" in case and not layers_each:
        layers_each = stage // 2
    chunks = max(1, stage // layers_each) if layers_each and pipeline > 1 else 1
    architecture = _architecture(row)
    deterministic = _deterministic(row, case, architecture)
    own = bool(re.match(r"gpt3_mcore_tp\d", case)) and not case.endswith("_te")
    return Megatron(
        config=config,
        samples=samples,
        tensor=tensor,
        pipeline=pipeline,
        context_ranks=context_ranks,
        shards=shards,
        chunks=chunks,
        chunk_layers=stage // chunks,
        last_layers=stage // chunks - counts,
        # Stages take turns of as many micro-batches as there are of them; the test of that option has five.
        group=5 if "tunable_overlap" in case else pipeline,
        sequence_parallel=_flag(row, "seq_parallel"),
        recompute=row.get("recompute", "") == "full",
        dtype="float8" if row.get("fp8") else "float16" if _flag(row, "fp16") else "bfloat16",
        sharded=fully,
        transformer_engine=not own,
        attention="unfused" if own else _attention(row, deterministic, architecture),
        norm_in_attention="qk_layernorm" in case,
        deterministic=deterministic,
        architecture=architecture,
        fused_loss=_flag(row, "ce_fusion") or "cross_entropy_loss_fusion" in case,
        deferred_logits=2 if "defer_embedding_wgrad" in case and pipeline > 1 else 0,
    )


def _config(row: Mapping[str, str], tensor: int) -> ModelConfig:
    layers, width, heads, context = (_whole(row, name) for name in ("n_layers", "d_model", "n_heads", "seq_len"))
    if not (layers and width and heads and context):
        raise UserError("expected n_layers, d_model, n_heads and seq_len")
    swiglu = _flag(row, "swiglu")
    multiple = DIVISIBLE * tensor
    vocabulary = _whole(row, "vocab_size") or VOCABULARY
    return ModelConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=_whole(row, "kv_groups") or 0,
        # Megatron makes SwiGLU's three matrices about as large as two of four times the width.
        ff=_whole(row, "ffn") or (int(4 * width * 2 / 3 / 64) * 64 if swiglu else 4 * width),
        context=context,
        vocabulary=-(-vocabulary // multiple) * multiple,
        norm="rmsnorm" if row.get("norm", "").lower() == "rmsnorm" else "layernorm",
        position="rotary" if row.get("pos_emb", "") == "rope" else "learned",
        activation="swiglu" if swiglu else "gelu",
        bias=not _flag(row, "no_bias"),
        tied=not _flag(row, "untied"),
    )


def _architecture(row: Mapping[str, str]) -> Literal["ampere", "hopper", "blackwell"]:
    gpu = row.get("gpu", "").lower()
    if gpu.startswith("a100"):
        return "ampere"
    if gpu.startswith(("h100", "h200")):
        return "hopper"
    if gpu.startswith(("gb200", "b200")):
        return "blackwell"
    raise UserError(f"gpu: expected a100, h100, h200, b200 or gb200, got {row.get('gpu')!r}")


def _deterministic(row: Mapping[str, str], case: str, architecture: str) -> bool:
    """Megatron's deterministic mode excludes FlashAttention and the compiled loss; most of its tests run in it.

    Of tests that only ask Transformer Engine for deterministic algorithms, those on Blackwell have such workspaces too.
    """
    excluded = _flag(row, "ce_fusion") or "cross_entropy_loss_fusion" in case
    excluded |= row.get("attn_backend") == "flash" and architecture != "blackwell"
    return not (excluded or "nondeterministic" in case or "release" in case or re.search(r"reshard_\d", case))


def _attention(row: Mapping[str, str], deterministic: bool, architecture: str) -> Literal["fused", "flash", "unfused"]:
    if (named := row.get("attn_backend", "")) in ("unfused", "flash"):
        return "unfused" if named == "unfused" else "flash"
    # Older containers have no deterministic attention that is fused.
    if deterministic and "dracooci" in row.get("golden_file", "") and row.get("environment") == "lts":
        return "unfused"
    return "fused" if architecture == "hopper" else "flash"


def _whole(row: Mapping[str, str], name: str) -> int:
    text = row.get(name, "").strip()
    if not text:
        return 0
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        value = math.nan
    if not (0 <= value <= _LARGEST and value == int(value)):
        raise UserError(f"{name}: expected a whole number, got {text!r}")
    return int(value)


_LARGEST = 10**9
"""Of any number of a run: what is more is a slip."""


def _flag(row: Mapping[str, str], name: str) -> bool:
    return row.get(name, "").strip().lower() in ("true", "1", "yes")
