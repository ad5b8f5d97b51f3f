"""What a planner knows of the machines that a run is planned for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """One accelerator, or one rank's share of a CPU.

    Attributes:
        name: As users call it, such as "h100".
        memory: Bytes that a process can use.
        bandwidth: Bytes a second that its memory moves, as the datasheet says it.
        peak: Dense floating-point operations a second of the datasheet, by dtype; MFU counts against it.
        ceiling: What matrices multiply at most when measured, by dtype; where nobody measured it, a share of the peak.
        watts: What it draws at most, for energy; 0 where unknown.
    """

    name: str
    memory: int
    bandwidth: float
    peak: Mapping[str, float]
    ceiling: Mapping[str, float]
    watts: float = 0.0


@dataclass(frozen=True)
class Link:
    """What connects ranks.

    Attributes:
        latency: Seconds that each round of a collective takes beside its bytes.
        bandwidth: Bytes a second that each rank sends, and receives at the same time.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Rates:
    """What one operator takes on a machine where it was measured: a time of its own, and one for each unit of its work.

    Attributes:
        fixed: Seconds of the smallest call.
        per_flop: Seconds for each floating-point operation.
        per_byte: Seconds for each byte.
        per_block: Seconds for each block of an operator that works in blocks, `Operation.blocks`.
    """

    fixed: float = 0.0
    per_flop: float = 0.0
    per_byte: float = 0.0
    per_block: float = 0.0

    def seconds(self, flops: float, size: float, blocks: int = 0) -> float:
        """Seconds of a call of so many floating-point operations over so many bytes, in so many blocks."""
        return self.fixed + self.per_flop * flops + self.per_byte * size + self.per_block * blocks


@dataclass(frozen=True)
class Kernels:
    """How far real kernels stay below a device's figures. Few numbers with a physical meaning.

    Attributes:
        launch: Seconds that the host takes to launch one operation; a unit takes at least those of all of its own.
        memory_efficiency: Share of the memory's bandwidth that elementwise kernels reach.
        matmul_efficiency: Share of the ceiling that large matmuls reach within a model.
        half_flops: Floating-point operations of a matmul that reaches half of that share.
        attention_efficiency: Share of the ceiling that fused attention reaches.
        contention: How much longer computing takes while a collective runs beside it at the rate of a host's links: 0.1
            is a tenth.
        straggling: How much longer a step takes with each doubling of hosts, as all wait for the slowest: 0.01 is a
            hundredth.
        matmul_passes: How many times a matmul's matrices pass through memory beside its computing: tiles are fetched
            more than once, and neither a kernel's start nor its end overlaps with anything.
    """

    launch: float
    memory_efficiency: float
    matmul_efficiency: float
    half_flops: float
    attention_efficiency: float
    contention: float = 0.0
    straggling: float = 0.0
    matmul_passes: float = 0.0

    @property
    def lost(self) -> float:
        """Seconds of computing that a second of such a collective takes away."""
        return self.contention / (1 + self.contention)


@dataclass(frozen=True)
class Hardware:
    """Machines of one kind.

    Attributes:
        device: Each of their devices.
        kernels: What computing takes on it.
        devices_per_host: Neighbouring ranks that `within` connects.
        within: Between ranks of one host.
        between: Between hosts, for each rank.
        framework: Bytes of a device that PyTorch, driver and communicators take outside of what the allocator counts.
        source: Where the figures are from: a datasheet's name, or a file of measured costs.
        hooks: Seconds of the host for each op of a schedule, where nothing hides them: what the engine's hooks take.
        measured: Where this very machine was measured, what operators and collectives take on it, instead of what
            `kernels` and links make of them. Keys are such as "gelu float32", "matmul bfloat16" for all of a kind that
            have no own, "update", "copy_in", "cast" and "squares" of an engine, and "all_reduce 2" between two ranks of
            a host.
    """

    device: Device
    kernels: Kernels
    devices_per_host: int
    within: Link
    between: Link
    framework: int = 0
    source: str = ""
    hooks: float = 0.0
    measured: Mapping[str, Rates] = field(default_factory=dict)

    @property
    def is_cpu(self) -> bool:
        """Whether its devices are CPUs, of which operators are measured one by one, and of nothing else."""
        return any(name.endswith(" float32") for name in self.measured)
