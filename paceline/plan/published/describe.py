"""From a row of a published table to the run that it describes and what was measured of it, or the reason why not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import UserError
from paceline.plan.published.settings import precision, recompute, sharding, unread
from paceline.plan.published.shapes import shape
from paceline.plan.published.table import Row
from paceline.plan.run import Run

DEVICES_PER_HOST = 8
"""Of every machine of the published tables but those that say otherwise."""


@dataclass(frozen=True)
class Described:
    """A row that a step can be predicted for.

    Attributes:
        run: What was run.
        gpu: On which devices, in the row's words.
        network: Bytes a second of each device between hosts, where the row says it.
        stack: Whose kernels it ran with: a key of `stacks.STACKS`.
        devices_per_host: Where the row says it.
        compiled: Whether kernels are fused, where the row says it.
        fused_attention: Whether attention is one kernel, where the row says it.
        assumed: What the row leaves out and was assumed, in words.
    """

    run: Run
    gpu: str
    network: float | None
    stack: str
    devices_per_host: int | None
    compiled: bool | None
    fused_attention: bool | None
    assumed: tuple[str, ...]

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
    gpu = row.text("gpu") or _gpu_in(row)
    if not gpu:
        raise UserError("gpu: expected the device's name, got none")
    per_host = row.whole("devices_per_host") or DEVICES_PER_HOST
    stack = stack_of(row)
    named = _parallelism(row)

    def ranks(name: str) -> int:
        return row.whole(name) or named.get(name, 1)

    tensor, pipeline, context_ranks = ranks("tp"), ranks("pp"), ranks("cp")
    devices = _devices(row, tensor * pipeline * context_ranks, per_host)
    data = devices // (tensor * pipeline * context_ranks)
    if devices % (tensor * pipeline * context_ranks):
        raise UserError(
            f"expected n_gpus that tp x pp x cp divides, got {devices} and {tensor * pipeline * context_ranks}"
        )
    if (stated := row.whole("dp")) is not None and stated != data and row.whole("ep") in (None, 1):
        raise UserError(f"expected dp = n_gpus / (tp x pp x cp) = {data}, got {stated}")
    samples, micro_batches, batch_assumed = _batch(row, data, config.context, pipeline)
    if stack == "torchtitan" and pipeline > 1 and row.whole("micro_batches") is None:
        samples, micro_batches, batch_assumed = _in_stages(samples * micro_batches, pipeline)
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
        sequence_parallel=_shares_tokens(row, stack),
        **_OWN_WAYS.get(stack, {}),
    )
    if tensor * pipeline * context_ranks > 1:
        assumed.append("tensor, pipeline and context ranks by formula")
    network, how = _network(row, per_host)
    assumed += [how] if how and run.data * tensor * pipeline * context_ranks > per_host else []
    return Described(
        run=run,
        gpu=gpu,
        network=network,
        stack=stack,
        devices_per_host=row.whole("devices_per_host"),
        compiled=_compiled(row),
        fused_attention=_fused_attention(row),
        assumed=tuple(assumed),
    )


_OWN_WAYS: dict[str, dict[str, Any]] = {
    # nanotron's optim/gradient_accumulator.py and optim/zero.py: DDP's buckets of 25 MiB in bf16 are added to fp32
    # sums, which are reduced whole, with ZeRO-1 too; that gathers what it updated before a step ends.
    "nanotron": {"reduces_whole": True, "bucket": 25 * 2**20 // 2, "gathers_first": True, "added": 10},
}
"""What a program does in another way than others, as `Run` has it: read in its source."""


def stack_of(row: Row) -> str:
    """The program that a row was measured with, as far as it tells: a key of `stacks.STACKS`."""
    text = " ".join(row.text(name) for name in ("source", "table", "label"))
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


_WORDS = {"tensor": "tp", "pipeline": "pp", "context": "cp"}
_DIMENSION = r"(?<![a-z])(tp|pp|cp|tensor|pipeline|context)"


def _parallelism(row: Row) -> dict[str, int]:
    """Sizes in words such as "FSDP 8, TP 4", "dp=8 tp=2" or "8-way TP".

    Raises:
        UserError: It speaks of tensor, pipeline or context ranks and neither it nor a column says how many.
    """
    found: dict[str, int] = {}
    text = row.text("parallelism")
    after = rf"{_DIMENSION}(?:[ _-]*parallel\w*)?(?:[ _-]*(?:size|degree))?[ _:=x(-]*(\d+)"
    before = rf"(\d+)[ -]*way[ -]*{_DIMENSION}"
    named = [*re.findall(after, text), *((word, size) for size, word in re.findall(before, text))]
    for word, size in named:
        found[_WORDS.get(word, word)] = int(size)
    for word in re.findall(_DIMENSION, text):
        short = _WORDS.get(word, word)
        if short not in found and short not in row.values:
            raise UserError(
                f"parallelism: expected a number of ranks beside {word!r}, got {row.values['parallelism']!r}"
            )
    return found


def _devices(row: Row, cut: int, per_host: int) -> int:
    devices, hosts = row.whole("devices"), row.whole("hosts")
    if devices is None and hosts is not None:
        devices = hosts * per_host
    data = row.whole("dp")
    if data is None and row.text("dp_shard").isdecimal() and row.number("dp_shard"):
        data = (row.whole("dp_shard") or 1) * (row.whole("dp_replicate") or 1)
    if devices is None and data is not None:
        devices = data * cut
    if devices is None:
        raise UserError("n_gpus: expected the number of devices, got none")
    return devices


def _batch(row: Row, data: int, context: int, stages: int) -> tuple[int, int, list[str]]:
    """Sequences of a micro-batch and micro-batches of a step: two of three numbers tell the third."""
    samples, micro_batches, batch = row.whole("samples"), row.whole("micro_batches"), row.whole("global_batch")
    if batch is None and (tokens := row.number("global_batch_tokens")):
        batch = round(tokens / context)
    if samples is not None and batch is not None:
        if batch % (samples * data):
            raise UserError(f"expected a global batch that {data} ranks x {samples} samples divide, got {batch}")
        return samples, batch // (samples * data), []
    if batch is not None:
        micro_batches = micro_batches or 1
        if batch % (micro_batches * data):
            raise UserError(f"expected a global batch that {data} ranks x {micro_batches} divide, got {batch}")
        each = batch // (micro_batches * data)
        if row.whole("micro_batches") is None and each > 1:
            return 1, each, ["micro-batches of 1 sequence"]
        return each, micro_batches, []
    if samples is not None:
        if micro_batches is None and stages > 1:
            return 1, samples, ["a local batch cut into micro-batches of 1 sequence"]
        return samples, micro_batches or 1, [] if micro_batches else ["one micro-batch a step"]
    raise UserError("expected a micro-batch or a global batch, got neither")


def _in_stages(local: int, stages: int) -> tuple[int, int, list[str]]:
    """What a pipeline of torchtitan takes at once is a local batch, in as many micro-batches as it has stages."""
    count = min(local, stages)
    if local % count:
        raise UserError(f"expected a local batch that {count} micro-batches divide, got {local}")
    return local // count, count, [f"a local batch cut into {count} micro-batches, as torchtitan does"]


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
        return (
            "a functional test's: deterministic kernels, a loss logged in each step, and models that take milliseconds"
        )
    return ""
