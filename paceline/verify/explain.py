"""A difference in words: where it appeared, which op is the first that can explain it, and what to look for."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.verify.differences import Difference

_LOOK = (
    "Look for what depends on the rank, on an attribute that is neither parameter nor buffer, on a tensor kept from "
    "before pl.parallelize, or on calls before this one"
)


def explain(difference: Difference, changing: Sequence[str] = ()) -> str:
    """One paragraph.

    Args:
        difference: The first one.
        changing: Buffers that a training forward changes.
    """
    d = difference
    where = f"step {d.step}, micro-batch {d.micro_batch}, rank {d.rank}"
    named = f"{d.parameter} (unit {d.unit}{f', {_bucket(d.bucket)}' if d.bucket else ''})"
    size = "cannot be compared" if d.size == float("inf") else f"differs by {d.size:.1e}"
    states = (
        f". Forward changes the buffers {', '.join(changing[:3])}, which are each rank's own until the step is over"
        if changing
        else ""
    )
    if d.kind == "weights" and d.step == 0:
        return (
            f"before the first step {named} {size}, rank {d.rank}: build gave rank 0 another model than it gave one "
            "process, though both had the same seed"
        )
    if d.kind == "weights":
        return (
            f"{where}: {named} {size} where forward computes with it, though each rank's shard of it was right after "
            f"the update. The first op that can explain it: {d.op or 'none, so somebody else changed it'}"
            f"{f' of {_bucket(d.bucket)}' if d.op else ''}"
        )
    if d.kind == "output":
        return (
            f"{where}: what unit {d.unit} gives {size}, though its parameters and all units before it are right. The "
            f"first op that can explain it: forward of {d.unit}, or of what lies before it outside units. It "
            f"computes something else there than in one process. {_LOOK}{states}"
        )
    if d.kind == "loss":
        if d.op == "forward":
            return (
                f"{where}: the loss {size}, though parameters and what units give are right. The first op that can "
                f"explain it: forward, outside of all units. {_LOOK}{states}"
            )
        return f"step {d.step}, rank {d.rank}: the sum of all losses {size}. The first op that can explain it: {d.op}"
    if d.kind == "local":
        return (
            f"{where}: the gradient of {named} {size} as this rank's own backward gives it, though the loss is right. "
            f"The first op that can explain it: backward of {d.unit}. {_LOOK}"
        )
    if d.kind == "copied in":
        return (
            f"{where}: the gradient of {named} {size} where it lies in its bucket, though backward gave it right. The "
            f"first op that can explain it: copy_in of {d.unit}"
        )
    if d.kind in ("reduced", "gradient"):
        return (
            f"step {d.step}, rank {d.rank}: the reduced gradient of {named} {size} before the update. The first op "
            f"that can explain it: {d.op or 'backward'}{f' of {_bucket(d.bucket)}' if d.op else ''}"
        )
    if d.kind == "norm":
        return (
            f"step {d.step}, rank {d.rank}: the gradient norm {size}, though all gradients are right. The first op "
            "that can explain it: the sum of the squares over ranks"
        )
    op = f"{d.op} of {_bucket(d.bucket)}" if d.op == "broadcast" else "update"
    return (
        f"step {d.step}, rank {d.rank}: {named} {size} after the update, though its gradient was right. The first op "
        f"that can explain it: {op}"
    )


def _bucket(name: str) -> str:
    return name if name.startswith("bucket ") else f"bucket {name}"
