"""The user's choice of how N ranks share one model, as one frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from paceline.core.errors import UserError

Stage = Literal[0, 1, 2, 3]
Accumulation = Literal["auto", "each", "defer", "hold"]

SHARDING: dict[str, Stage] = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3}
"""PyTorch FSDP's names for the stages."""

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Other names of precisions."""


@dataclass(frozen=True)
class Strategy:
    """The way in which N ranks share one model: an immutable value, all of whose settings have defaults.

    The stages of ZeRO (Rajbhandari et al. 2020) and the historical systems of data parallelism are settings of
    this one value, not classes: `SYSTEMS` names the latter.

    Attributes:
        zero: What is sharded: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters. FSDP's names are
            understood and become these numbers.
        shard: Over how many ranks a replica is sharded, with zero 1 to 3; 0: all ranks. With fewer than all,
            neighbouring ranks form a shard group and the groups are replicas of each other (hybrid sharding).
        share_parameters: With zero 1 to 3 on the CPU: the ranks of a group, all on one host, compute with one copy of
            the parameters between them, in memory that they share. Each updates its shard in place, and nothing is
            gathered. A rank's part of that copy is the shard that it would hold at zero 3, where this differs from
            zero 2 in nothing else.
        precision: What parameters and gradients are computed in. float32 leaves the model as it is; with bfloat16 and
            float16 each rank keeps an fp32 master of the shard that it updates. auto: bfloat16 on GPUs that compute in
            it, else float32. torch's dtypes and the short names are understood, too.
        reduce_in_float32: With low precision: whether gradients are kept, sent and reduced in fp32. If not, they are
            kept and sent as computed, summed in fp32 and rounded once.
        accumulation: What happens between the micro-batches of a step. each: gradients are reduced in every
            micro-batch. defer: full gradients are held, and reduced in the last. hold (zero 3): as each, but parameters
            stay gathered from the first forward to the last backward. auto: defer where full gradients are held
            anyway (zero 0 and 1), else each.
        prefetch: With zero 3: how many units are gathered ahead of the one that computes. Each takes room for one more
            whole unit; 0 gathers every unit as it is needed, and waits for it.
        recompute: Activations of a unit's inside: kept (none), computed again in backward from the unit's input (unit),
            or all but attention's (keep_attention).
        recompute_every: Recompute only every k-th of the repeated units.
        synchronize: When gradients are reduced: while backward still runs, or after it.
        packing: How gradients are packed: buckets filled from the last layer to the first, one collective per
            parameter, or one flat buffer.
        bucket_mb: Size of a bucket in MiB, used with packing=bucket. A larger parameter gets a bucket of its own.
        wire: What fp32 gradients are sent as between hosts, for slow links between CPUs: full, rounded to bf16, or as
            blocks of 8-bit integers whose rounding errors are added to what is sent in the next step. Sums are in fp32
            either way.
        collective: all_reduce: every rank gets the reduced gradients and updates its replica. parameter_server:
            gradients are reduced to rank 0, which alone updates and broadcasts the weights back.
        gradients: What the reduced gradients are over ranks: their mean, as in PyTorch's DDP, or their sum (for losses
            that are sums, to be divided by a global count).
        units: Names (or shell patterns) of the modules that are units. Empty: found by looking for repeated blocks.

    Raises:
        UserError: A value is out of its range, or two settings contradict each other.

    Example:
        >>> pl.Strategy(zero="FULL_SHARD", precision="bf16") == pl.Strategy(zero=3, precision="bfloat16")
        True
        >>> from dataclasses import replace
        >>> replace(pl.SYSTEMS["manual"], bucket_mb=1.0).packing
        'parameter'
    """

    zero: Literal[0, 1, 2, 3, "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"] = 0
    shard: int = 0
    share_parameters: bool = False
    precision: Literal["auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] = "float32"
    reduce_in_float32: bool = True
    accumulation: Accumulation = "auto"
    prefetch: int = 1
    recompute: Literal["none", "unit", "keep_attention"] = "none"
    recompute_every: int = 1
    synchronize: Literal["overlap", "after"] = "overlap"
    packing: Literal["bucket", "parameter", "flat"] = "bucket"
    bucket_mb: float = 25.0
    wire: Literal["full", "bfloat16", "int8"] = "full"
    collective: Literal["all_reduce", "parameter_server"] = "all_reduce"
    gradients: Literal["mean", "sum"] = "mean"
    units: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = str(self.precision).removeprefix("torch.")
        object.__setattr__(self, "precision", PRECISIONS.get(named, named))
        choices = {
            "synchronize": ("overlap", "after"),
            "packing": ("bucket", "parameter", "flat"),
            "collective": ("all_reduce", "parameter_server"),
            "gradients": ("mean", "sum"),
            "wire": ("full", "bfloat16", "int8"),
            "precision": ("auto", "float32", "bfloat16", "float16"),
            "accumulation": ("auto", "each", "defer", "hold"),
            "recompute": ("none", "unit", "keep_attention"),
            "zero": (0, 1, 2, 3, *SHARDING),
        }
        for field, allowed in choices.items():
            value = getattr(self, field)
            if value not in allowed:
                raise UserError(f"strategy.{field}: expected one of {', '.join(map(str, allowed))}, got {value!r}")
        if not 0 < self.bucket_mb < math.inf:
            raise UserError(
                f"strategy.bucket_mb: expected a size above 0 MiB, got {self.bucket_mb}; "
                "for one collective per parameter set strategy.packing to parameter"
            )
        if self.prefetch < 0:
            raise UserError(f"strategy.prefetch: expected 0 or more units, got {self.prefetch}")
        if self.recompute_every < 1:
            raise UserError(f"strategy.recompute_every: expected 1 or more, got {self.recompute_every}")
        if self.shard < 0:
            raise UserError(f"strategy.shard: expected 0 or more, got {self.shard}")
        if self.zero == "HYBRID_SHARD" and not self.shard:
            raise UserError(
                "strategy.zero HYBRID_SHARD: say with strategy.shard over how many ranks a replica is sharded, such as "
                "the devices of a host"
            )
        object.__setattr__(self, "zero", self.stage)
        object.__setattr__(self, "units", tuple(self.units))
        self._check_mix()

    def _check_mix(self) -> None:
        mixes: list[tuple[bool, str]] = [
            (
                self.shard > 0 and self.stage == 0,
                f"shard={self.shard} says over how many ranks a replica is sharded, but zero=0 shards nothing: set "
                "zero to 1, 2 or 3, or leave shard out",
            ),
            (
                self.recompute_every > 1 and self.recompute == "none",
                f"recompute_every={self.recompute_every} says which units are recomputed, but recompute=none keeps all "
                "activations: set recompute to unit or keep_attention, or leave recompute_every out",
            ),
            (
                not self.reduce_in_float32 and self.precision == "float32",
                "reduce_in_float32 is off, which is for gradients computed in low precision, but precision=float32 "
                "computes them in fp32: set precision to bfloat16 or float16, or leave reduce_in_float32 on",
            ),
            (
                self.collective == "parameter_server" and (self.stage > 0 or self.low),
                "collective=parameter_server updates whole fp32 replicas on rank 0: set zero to 0 and precision to "
                "float32, or collective to all_reduce",
            ),
            (
                self.collective == "parameter_server" and self.accumulation not in ("auto", "defer"),
                "collective=parameter_server reduces once a step: leave accumulation at auto",
            ),
            (
                self.stage >= 2 and (self.packing != "bucket" or self.synchronize == "after"),
                f"zero={self.stage} frees gradients while backward runs, so they are reduced in buckets of whole "
                "units: leave packing at bucket and synchronize at overlap, or set zero to 1",
            ),
            (
                self.share_parameters and self.stage == 0,
                "share_parameters lets each rank update its shard of a copy that all compute with, but zero=0 has no "
                "shards: set zero to 1, 2 or 3, or leave share_parameters out",
            ),
            (
                self.wire != "full" and not self.reduce_in_float32,
                f"wire={self.wire} is about fp32 gradients, but reduce_in_float32 is off, which sends them in "
                f"{self.precision}: set reduce_in_float32, or wire to full",
            ),
            (
                self.accumulation == "hold" and self.share_parameters,
                "accumulation=hold keeps gathered parameters, but with share_parameters none are gathered: leave "
                "accumulation at auto",
            ),
            (
                self.accumulation == "hold" and self.stage != 3,
                f"accumulation=hold keeps gathered parameters, which zero={self.stage} never reshards: set zero to 3, "
                "or accumulation to each or defer",
            ),
            (
                self.prefetch != 1 and not self.gathers,
                f"prefetch={self.prefetch} is about parameters that are gathered unit by unit, but with "
                f"zero={self.stage}{' and share_parameters' if self.share_parameters else ''} none are: set zero to 3, "
                "or leave prefetch out",
            ),
            (
                self.prefetch != 1 and self.accumulation == "hold",
                f"prefetch={self.prefetch} says how many gathered units there is room for, but accumulation=hold keeps "
                "all: leave prefetch out, or set accumulation to each or defer",
            ),
            (
                self.wire == "int8" and self.precision == "float16",
                "wire=int8 adds what rounding took off to the next step's gradients, which float16 scales by another "
                "factor: set wire to bfloat16, or precision to bfloat16",
            ),
            (
                self.accumulation == "defer" and not self.reduce_in_float32,
                "accumulation=defer adds gradients up before they are reduced, which needs fp32: set "
                "reduce_in_float32, or accumulation to each",
            ),
        ]
        for wrong, message in mixes:
            if wrong:
                raise UserError(f"strategy: {message}")

    @property
    def stage(self) -> Stage:
        """The stage of ZeRO as a number."""
        zero: Any = self.zero
        stage: Stage = SHARDING.get(zero, zero)
        return stage

    @property
    def gathers(self) -> bool:
        """Whether ranks hold shards of the parameters alone, and gather a unit's for its computing."""
        return self.stage == 3 and not self.share_parameters

    @property
    def low(self) -> bool:
        """Whether parameters are computed with in low precision, beside an fp32 master."""
        return self.precision in ("bfloat16", "float16")

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Whether gradients are reduced in every micro-batch, not only in a step's last."""
        if self.accumulation == "auto":
            return self.stage >= 2 or not self.reduce_in_float32
        return self.accumulation != "defer"

    @property
    def moves_parameters(self) -> bool:
        """Whether parameters lie in buffers, from where ranks send what they update or compute in another precision."""
        return self.stage > 0 or self.low or self.collective == "parameter_server"

    def has_server(self, world_size: int) -> bool:
        """Whether rank 0, a parameter server, updates all parameters and sends them to the others."""
        return self.collective == "parameter_server" and world_size > 1

    def shards(self, world_size: int) -> int:
        """Number of ranks that a replica is sharded over: 1 where nothing is.

        Raises:
            UserError: `shard` does not divide the number of ranks.
        """
        if self.stage == 0:
            return 1
        if self.shard and world_size % self.shard:
            raise UserError(
                f"strategy.shard: {world_size} ranks cannot form groups of {self.shard}; choose a divisor of "
                f"{world_size}"
            )
        return self.shard or world_size

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket in bytes."""
        return int(self.bucket_mb * 2**20)


SYSTEMS: dict[str, Strategy] = {
    "manual": Strategy(synchronize="after", packing="parameter"),
    "parameter server": Strategy(synchronize="after", packing="flat", collective="parameter_server"),
    "flat, after backward": Strategy(synchronize="after", packing="flat"),
    "buckets, after backward": Strategy(synchronize="after"),
    "per parameter, overlapped": Strategy(packing="parameter"),
    "buckets, overlapped": Strategy(),
}
"""The systems that data parallelism went through, oldest first, by name, as in `pl.SYSTEMS["parameter server"]`."""
