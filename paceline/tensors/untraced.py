"""Functions into which torch.compile does not look."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._dynamo import eval_frame

P = ParamSpec("P")
T = TypeVar("T")

_NEVER = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
"""Neither a frame nor what it calls is compiled."""


def untraced(method: Callable[P, T]) -> Callable[P, T]:
    """A function into which torch.compile does not look: its bookkeeping is no part of what a loop compiles."""

    # What torch.compiler.disable does, which loads the compiler, and that takes longer than most first steps.
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return method(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    eval_frame.set_code_exec_strategy(call.__code__, _NEVER)
    return call
