"""A historical system: rank 0 alone has the reduced gradients, updates, and sends what it updated to all. Pure."""

from __future__ import annotations

from paceline.core.layout import Bucket
from paceline.core.ops import Key, Kind, Op, Stream
from paceline.core.schedule import Schedule


class ParameterServer(Schedule):
    """The ops of one rank's step with a parameter server. Ranks differ in what they send."""

    reduction: Kind = "reduce"
    sends_updates_on: Stream = "reduce"

    @property
    def holders(self) -> int:
        """Rank 0 alone holds reduced gradients."""
        return 1

    @property
    def updated_buckets(self) -> tuple[Bucket, ...]:
        """All buckets that are reduced on rank 0, and none on its workers."""
        return self.reduced_buckets if self.rank == 0 else ()

    def send_update(self, micro_batch: int, after: tuple[Key, ...]) -> list[Op]:
        """The ops by which workers get what rank 0 has updated."""
        ops = []
        for bucket in self.reduced_buckets:
            whole, nothing = (self._plain.unsharded(bucket),), ()
            reads, writes = (whole, nothing) if self.rank == 0 else (nothing, whole)
            size = (bucket.numel, bucket.itemsize)
            ops.append(self._communicate("broadcast", bucket.name, micro_batch, "update", after, reads, writes, *size))
        return ops
