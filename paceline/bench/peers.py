"""The systems that paceline is compared with, each at the settings that were fastest on a CPU.

Tried and left out, as they cannot run over Gloo: ZeroRedundancyOptimizer's overlap_with_ddp ("Gloo backend using
Overlapping DDP with ZeRO may meet hangs") and DDP's own mixed precision ("cpu backend doesn't support events").
"""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.measuring.cases import ADAMW, GROUPS, Case, Precision, System, Training
from paceline.measuring.loops import loop, meeting, one_process

BUCKET_BYTES = 25 * 2**20
"""DDP's default and paceline's; DeepSpeed's own default, 2 GB, was slower in every case."""

VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True}
"""DDP at its best; `batched_grad_copy` besides where it exists."""


def peers(precision: Precision) -> list[System]:
    """Everything to compare with in one precision, the lower bounds of one process first."""
    found = [
        System("one process", "no communication", one_process, GROUPS),
        System("one process", "no communication, meeting once a step", meeting, GROUPS),
        System("torch DDP", "default", partial(_ddp, {}), GROUPS[:1]),
        System("torch DDP", "views, static graph", partial(_ddp, VIEWS), GROUPS[:2]),
    ]
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel.__init__).parameters:
        build = partial(_ddp, {**VIEWS, "batched_grad_copy": True})
        found.append(System("torch DDP", "views, static graph, batched grad copy", build, GROUPS[:2]))
    found.append(System("ZeroRedundancyOptimizer", "over DDP, bucket views", _zero_redundancy, GROUPS[1:2]))
    low = precision == "bfloat16"
    for reduced in ("bfloat16", "float32") if low else ("float32",):
        ending = f", reduced in {reduced}" if low else ""
        for kept in (True, False):
            build = partial(_fsdp2, kept, reduced)
            setting = ("parameters kept" if kept else "parameters freed after forward") + ending
            found.append(System("torch FSDP2", setting, build, GROUPS[2:], ("torch.distributed.fsdp",)))
        for name, group, settings in DEEPSPEED:
            build = partial(_deepspeed, settings, reduced)
            found.append(System("DeepSpeed", name + ending, build, (group,), ("deepspeed",)))
    return found


def _ddp(settings: dict[str, Any], case: Case, world: pl.World, precision: Precision) -> Training:
    model = DistributedDataParallel(case.build().to(world.device), **settings)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Training(model, loop(model, optimizer, case, world, precision == "bfloat16"))


def _zero_redundancy(case: Case, world: pl.World, precision: Precision) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(case.build().to(world.device), **VIEWS)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW)
    return Training(model, loop(model, optimizer, case, world, precision == "bfloat16"))


def _fsdp2(kept: bool, reduced: str, case: Case, world: pl.World, precision: Precision) -> Training:
    """Every block a unit, and the root the rest, as torch's own tutorial does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = case.build().to(world.device)
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, reduced))
    # None, the default, frees all but the root's, which backward needs first.
    reshard = False if kept else None
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Training(model, loop(model, optimizer, case, world, autocast=False))


DEEPSPEED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ZeRO 1", GROUPS[1], {"stage": 1, "compute_grad_norm": False}),
    ("ZeRO 2", GROUPS[1], {"stage": 2, "compute_grad_norm": False}),
    ("ZeRO 3, parameters kept", GROUPS[2], {"stage": 3, "stage3_allgather_sequential": True}),
    (
        "ZeRO 3, parameters freed after forward",
        GROUPS[2],
        {
            "stage": 3,
            "stage3_allgather_sequential": True,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
    ),
)
"""DeepSpeed's settings (name, group, its zero_optimization); by default stage 3 keeps parameters up to a billion."""


def _deepspeed(settings: dict[str, Any], reduced: str, case: Case, world: pl.World, precision: Precision) -> Training:
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that torch is giving up.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    # An operator compiled for half a minute at first use, and called by inference alone.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    gpu = world.device.type == "cuda"
    config = {
        "train_micro_batch_size_per_gpu": case.batch,
        # The default is to clip at 1, which the other systems do not do.
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision == "bfloat16"},
        "communication_data_type": {"bfloat16": "bf16", "float32": "fp32"}[reduced],
        "zero_optimization": {
            "reduce_bucket_size": BUCKET_BYTES // 4,
            # Without streams, as on a CPU, these two only add copies.
            "overlap_comm": gpu,
            "contiguous_gradients": gpu,
            **settings,
        },
    }
    model = case.build()
    linear = F.linear
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
        config=config,
        dist_init_required=False,
    )
    # Stage 3 puts a function of its own in F.linear's place for the whole process; here only while it runs.
    replacement = F.linear
    F.linear = linear
    inputs, targets = case.data(world.rank, world.device)

    def step() -> Tensor:
        F.linear = replacement
        try:
            loss: Tensor = engine(inputs, targets) / targets.numel()
            engine.backward(loss)
            engine.step()
        finally:
            F.linear = linear
        return loss.detach()

    return Training(engine, step)
