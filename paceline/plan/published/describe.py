"""From a row of a published table to the run that it describes and what was measured of it, or the reason why not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import UserError
from paceline.plan.published.division import (
    count_devices,
    count_per_host,
    divide_among_stages,
    divide_batch,
    stated_ranks,
)
from paceline.plan.published.settings import precision, recompute, sharding, unread
from paceline.plan.published.shapes import shape
from paceline.plan.published.stacks import OWN
from paceline.plan.published.table import Row
from paceline.plan.run import Run


@dataclass(frozen=True)
class Described:
    """A row that a step can be predicted for.

    Attributes:
        run: What was run.
        gpu: On which devices, in the row's words.
        network: Bytes a second of each device between hosts, where the row says it.
        stack: A key of `stacks.STACKS`, whose kernels it ran with.
        devices_per_host: Where the row says it.
        compiled: Whether kernels are fused, where the row says it.
        fused_attention: Whether attention is one kernel, where the row says it.
        assumed: What the row leaves out and was assumed, in words.
        row_scales: As `Software.row_scales`.
        compiled_loss: Whether the loss is compiled, too.
    """

    run: Run
    gpu: str
    network: float | None
    stack: str
    devices_per_host: int | None
    compiled: bool | None
    fused_attention: bool | None
    assumed: tuple[str, ...]
    row_scales: bool = False
    compiled_loss: bool = False

    @property
    def by_formula(self) -> bool:
        """Whether it has tensor, pipeline or context ranks, of which paceline's engine has none."""
        return self.run.tensor * self.run.pipeline * self.run.context_ranks > 1


@dataclass(frozen=True)
class Sample:
    """One row to fit constants to.

    Attributes:
        described: What was run.
        seconds: Its measured step.
        weight: How much it counts.
    """

    described: Described
    seconds: float
    weight: float = 1.0


def describe(row: Row) -> Described:
    """What a row says was run.

    Raises:
        UserError: It leaves out what a prediction needs, contradicts itself, or is of a kind that is not predicted.
    """
    if row.fault:
        raise UserError(row.fault)
    if any(re.search(r"(?<![a-z])(q?lora|peft)(?![a-z])", cell.lower()) for cell in row.raw.values()):
        raise UserError("fine-tuning with adapters: only training of all parameters is predicted")
    config, noted = shape(row)
    assumed = [noted] if noted else []
    gpu = row.values.get("gpu", "") or _gpu_in(row)
    if not gpu:
        raise UserError("gpu: expected the device's name, got none")
    per_host = count_per_host(row)
    stack = stack_of(row)
    named = stated_ranks(row)

    def ranks(name: str) -> int:
        return row.whole(name) or named.get(name, 1)

    tensor, pipeline, context_ranks = ranks("tp"), ranks("pp"), ranks("cp")
    devices = count_devices(row, tensor * pipeline * context_ranks, per_host)
    data = devices // (tensor * pipeline * context_ranks)
    if devices % (tensor * pipeline * context_ranks):
        raise UserError(
            f"expected n_gpus that tp x pp x cp divides, got {devices} and {tensor * pipeline * context_ranks}"
        )
    if (stated := row.whole("dp")) is not None and stated != data and row.whole("ep") in (None, 1):
        raise UserError(f"expected dp = n_gpus / (tp x pp x cp) = {data}, got {stated}")
    samples, micro_batches, batch_assumed = divide_batch(row, data, config.context, pipeline)
    if stack == "torchtitan" and pipeline > 1 and row.whole("micro_batches") is None:
        samples, micro_batches, batch_assumed = divide_among_stages(samples * micro_batches, pipeline)
    assumed += batch_assumed
    zero, shard = sharding(row, stack, devices, per_host)
    if shard > 1 and data % shard:
        raise UserError(f"expected {data} data-parallel ranks that groups of {shard} divide")
    again, share, said = recompute(row, stack, config)
    assumed += [said] if said else []
    dtype, gathered, reduced = precision(row, stack)
    assumed += unread(row)
    chunks = row.whole("chunks") or (2 if "interleave" in row.text("schedule") else 1)
    if (layers := row.whole("layers_per_chunk")) and pipeline > 1:
        chunks = max(1, config.layers // pipeline // layers)
    run = Run(
        config=config,
        devices=devices,
        samples=samples,
        micro_batches=micro_batches,
        tensor=tensor,
        pipeline=pipeline,
        chunks=chunks if pipeline > 1 else 1,
        context_ranks=context_ranks,
        zero=zero,
        shard=shard if shard != data else 0,
        recompute=again,
        recompute_share=share,
        dtype=dtype,
        gathered=gathered,
        reduced=reduced,
        overlap=_overlaps(row, stack),
        overlap_tensor=bool(row.flag("async_tp"))
        or "async" in row.text("parallelism")
        or stack in ("megatron", "nemo"),
        # Megatron-LM's megatron/training/arguments.py: overlap_p2p_comm, with interleaved stages alone.
        overlap_sent=stack in ("megatron", "nemo") and chunks > 1,
        sequence_parallel=_shares_tokens(row, stack),
        **_OWN_WAYS.get(stack, {}),
    )
    if tensor * pipeline * context_ranks > 1:
        assumed.append("tensor, pipeline and context ranks by formula")
    compiled_loss = stack == "torchtitan" and bool(_compiled(row)) and not _loss_apart(row)
    assumed += ["its loss compiled, as in torchtitan since 2025"] if compiled_loss else []
    network, how = _network(row, per_host)
    assumed += [how] if how and run.data * tensor * pipeline * context_ranks > per_host else []
    return Described(
        run=run,
        gpu=gpu,
        network=network,
        stack=stack,
        devices_per_host=per_host if {"devices_per_host", "hosts"} & row.values.keys() else None,
        compiled=_compiled(row),
        fused_attention=_fused_attention(row),
        compiled_loss=compiled_loss,
        assumed=tuple(assumed),
        row_scales=bool(re.search(r"row.?wise", row.text("precision") + row.text("fp8"))),
    )


_OWN_WAYS: dict[str, dict[str, Any]] = {
    # DeepSpeed's runtime/pipe/engine.py, is_pipe_partitioned and is_grad_partitioned.
    "megatron_deepspeed": {"sends_parts": True},
    # Its option scatter_gather_tensors_in_pipeline, on by default (Narayanan et al. 2021, section 4.1).
    "megatron_2021": {"sends_parts": True},
    # nanotron's optim/gradient_accumulator.py and optim/zero.py: DDP's buckets of 25 MiB in bf16 are added to fp32
    # sums, which are reduced whole, with ZeRO-1 too; that gathers what it updated before a step ends, into memory of
    # its own (distributed.py, all_gather_coalesced). Of a block: qkv, output, gate and up, down, two norms.
    "nanotron": {"reduces_whole": True, "bucket": 25 * 2**20 // 2, "copied_parts": 6, "added": 10},
}
"""What a program does in another way than others, as `Run` has it: read in its source."""


def stack_of(row: Row) -> str:
    """The program that a row was measured with, as far as it tells: a key of `stacks.STACKS`."""
    text = " ".join(row.text(name) for name in ("source", "table", "label"))
    if OWN in text:
        return OWN
    if "vtrain" in text:
        return "megatron_deepspeed"
    if re.search(r"llm-foundry|mosaicml|composer", text):
        return "composer"
    if "nemo" in text:
        return "nemo"
    if "torchtitan" in text:
        return "torchtitan"
    if "nanotron" in text or "ultrascale" in text or "ultra-scale" in text:
        return "nanotron"
    if re.search(r"fms|foundation-model-stack|maximizing-training|\bibm\b", text):
        return "fms"
    if re.search(r"megatron|narayanan|korthikanti|2104\.04473|2205\.05198", text):
        return "megatron_2021" if re.search(r"2021|2104\.04473|narayanan|korthikanti|2205\.05198", text) else "megatron"
    return "fsdp"


def _gpu_in(row: Row) -> str:
    """A device's name in the words of the table."""
    found = re.search(r"\b(gb200|gh200|[ahbv]\d00|l40s|mi300x)\b", row.text("table") + " " + row.text("source"))
    return found[1] if found else ""


def _overlaps(row: Row, stack: str) -> bool:
    if row.flag("overlap_grad") is not None:
        return bool(row.flag("overlap_grad"))
    return stack not in ("megatron_deepspeed", "megatron_2021")


def _shares_tokens(row: Row, stack: str) -> bool:
    said = row.flag("seq_parallel")
    return said if said is not None else stack in ("nemo", "nanotron", "torchtitan", "megatron")


def _compiled(row: Row) -> bool | None:
    return True if "compile" in row.text("parallelism") else row.flag("compile")


def _fused_attention(row: Row) -> bool | None:
    text = row.text("attention")
    return None if not text else text not in ("unfused", "torch", "eager", "local", "math", "false", "no")


def _network(row: Row, per_host: int) -> tuple[float | None, str]:
    """Bytes a second of each device between hosts, and how a row's words were read where they leave that open.

    Of words such as "1600 Gb/s per node", "8x400 Gbps" or "50 GB/s"; None where they tell no rate.
    """
    said = row.values.get("network", "")
    told = re.search(r"\d+(\.\d+)?\s*[GT]b(ps|/s).*", row.values.get("table", ""))
    for part in re.split(r"[,;+&]| and ", said or (told[0] if told else "")):
        found = re.search(r"(?:(\d+)\s*[x×]\s*)?(\d+(?:\.\d+)?)\s*([GT])(B|b|ig)", part)
        if not found or re.search(r"nvlink|nvswitch|pcie", part, re.IGNORECASE):
            continue
        size = float(found[2]) * {"G": 1e9, "T": 1e12}[found[3]] / (1 if found[4] == "B" else 8)
        size *= int(found[1] or 1)
        if not size:
            break
        if re.search(r"per[ _-]*(gpu|device)|/gpu", part, re.IGNORECASE):
            return size, ""
        # No device has a wire of its own of more than 800 Gb/s.
        if found[1] or re.search(r"node|host|server|machine", part, re.IGNORECASE) or size > 100e9:
            return size / per_host, ""
        return size, f"network {part.strip()!r} for each device"
    return None, f"network {said!r} tells no rate between hosts, the datasheet's assumed" if said else ""


def measured_in_tests(row: Row) -> str:
    """Why a row's time is none of a run for speed; "" where it is."""
    if "functional_tests" in row.text("source"):
        return "a functional test's: deterministic kernels, a loss logged in each step, and mostly a small model"
    return ""


def _loss_apart(row: Row) -> bool:
    """Whether a row is of a torchtitan that compiles blocks alone: until 2025 its compiled loss failed."""
    text = " ".join(row.text(name) for name in ("source", "table", "label", "notes"))
    return bool(re.search(r"(?<![0-9a-z])20(23|24)[-_/.]?(?:[01]\d)?(?!\d)|docs/performance", text))
