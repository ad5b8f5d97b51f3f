"""Seconds of operations on a device: a roofline whose roof for matmuls rises with their size. Pure.

An operation takes the longer of two times: what its floating-point operations take at the rate that such a kernel
reaches, and what its bytes take at the rate that the device's memory reaches (Williams et al. 2009, Roofline). Rates
are measured ceilings times the shares of `Kernels`, never a datasheet's peak.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.errors import UserError
from paceline.plan.hardware import Device, Hardware
from paceline.plan.work import Operation

UNALIGNED = 0.157
"""Share of the ceiling that products in 16 bits reach whose rows begin anywhere: those of GPT-2's output layer, of
50,257 columns, forward and backward, took 30.6 ms for 3.79 TFLOP on an H200 whose ceiling was 792 TFLOP/s (torch 2.11).
"""


def seconds(operation: Operation, hardware: Hardware) -> float:
    """Seconds that a device takes for one operation, all of its `count`, when the host is ahead of it.

    Raises:
        UserError: The device has no ceiling for what the operation computes in.
    """
    kernels, device = hardware.kernels, hardware.device
    measured = hardware.measured.get(f"{operation.name} {operation.dtype}") or hardware.measured.get(
        f"{operation.kind} {operation.dtype}"
    )
    if measured is not None:
        # On CPUs, where the host that launches is what computes.
        once = measured.seconds(operation.flops, operation.bytes, operation.blocks)
        return (once + kernels.launch) * operation.count
    moving = operation.bytes / (device.bandwidth * kernels.memory_efficiency)
    computing = 0.0
    if operation.kind == "matmul" and operation.flops:
        # A kernel takes F / rate, beside it whatever its size the time of `half_flops` at that rate, and the time of
        # moving its matrices so often: the narrower they are, the more of them there is for each operation.
        rate = ceiling(device, operation.dtype) * kernels.matmul_efficiency * (1 if operation.aligned else UNALIGNED)
        computing = (operation.flops + kernels.half_flops) / rate + kernels.matmul_passes * moving
    elif operation.kind == "attention":
        computing = operation.flops / (ceiling(device, attention_dtype(operation.dtype)) * kernels.attention_efficiency)
    return max(computing, moving) * operation.count


def total(operations: Iterable[Operation], hardware: Hardware) -> float:
    """Seconds of operations that run one after another: the device's, or its host's that launches them if more.

    The host runs ahead of the device, so it is a unit's sums that compare, not each operation's times.
    """
    listed = tuple(operations)
    launches = sum(operation.count for operation in listed) * hardware.kernels.launch
    return max(sum(seconds(operation, hardware) for operation in listed), launches)


def moving(name: str, size: float, hardware: Hardware) -> float:
    """Seconds of an op of the engine, such as "copy_in", that reads and writes `size` bytes."""
    if name in hardware.measured:
        return hardware.measured[name].seconds(0.0, size)
    return size / (hardware.device.bandwidth * hardware.kernels.memory_efficiency)


def ceiling(device: Device, dtype: str) -> float:
    """Floating-point operations a second that matrices of a dtype multiply at most.

    Raises:
        UserError: The device is not known to compute in it.
    """
    if dtype in device.ceiling:
        return device.ceiling[dtype]
    known = ", ".join(device.ceiling) or "nothing"
    raise UserError(
        f"{device.name}: expected a precision that it is known to multiply matrices in ({known}), got {dtype}; a model "
        "whose own parameters or inputs are of that dtype computes in it whatever the precision is"
    )


def attention_dtype(dtype: str) -> str:
    """What attention computes in: bfloat16 where matmuls take 8 bits, as published kernels keep its products wider."""
    return "bfloat16" if dtype == "float8" else dtype
