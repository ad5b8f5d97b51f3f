"""Engines that lack one wait or one gate each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from paceline.buffers.earlier_gradients import EarlierGradients
from paceline.buffers.parameters import Parameters
from paceline.core.ops import Op
from paceline.engine import gradients as gradients_module
from paceline.executor.executor import Executor

Mutant = Callable[[ExitStack], None]
"""Takes something away until the stack is left."""


def without(owner: type, *methods: str) -> Mutant:
    """Methods that only wait return at once."""

    def mutate(stack: ExitStack) -> None:
        for method in methods:
            stack.enter_context(patch.object(owner, method, lambda *args: None))

    return mutate


def without_after(*kinds: str, phase: str = "", stream: str = "") -> Mutant:
    """Ops of some kinds come after nothing."""

    def mutate(stack: ExitStack) -> None:
        load = Executor.load

        def loaded(self: Executor, step: int, ops: Any) -> None:
            load(self, step, [replace(op, after=()) if matches(op) else op for op in ops])

        stack.enter_context(patch.object(Executor, "load", loaded))

    def matches(op: Op) -> bool:
        return op.kind in kinds and phase in ("", op.phase) and stream in ("", op.stream)

    return mutate


def ungated(stack: ExitStack) -> None:
    """Collectives start as soon as they are loaded."""

    def advanced(self: Executor) -> None:
        for queue in self._progress._queues.values():
            while queue:
                op = queue.popleft()
                self._launch(op, self._work(op), [self._outstanding[k] for k in op.after if k in self._outstanding])
                self._progress.done(op.key)

    stack.enter_context(patch.object(Executor, "_advance", advanced))


def not_behind(stack: ExitStack) -> None:
    """Collectives do not wait for those on other streams."""
    launch = Executor._launch
    stack.enter_context(patch.object(Executor, "_launch", lambda self, op, work, after=(): launch(self, op, work)))


def gathers_out_of_turn_unwaited(stack: ExitStack) -> None:
    """What runs outside of the schedule is not waited for."""

    def run(self: Executor, ops: Any, work: Any = None) -> None:
        for op in ops:
            self._progress.admit(op)
            self._launch(op, work or self._work(op))
            self._progress.done(op.key)

    stack.enter_context(patch.object(Executor, "run", run))


class _Never(set[str]):
    def update(self, *others: Any) -> None:
        return None


def nothing_on_its_way(stack: ExitStack) -> None:
    """Updates that others make are taken to be here."""
    init = Parameters.__init__

    def made(self: Parameters, *args: Any) -> None:
        init(self, *args)
        self.waiting = _Never()

    stack.enter_context(patch.object(Parameters, "__init__", made))


def shards_unwaited(stack: ExitStack) -> None:
    """A gradient that is still reduced may be looked at."""
    become_shard = gradients_module.become_shard
    stack.enter_context(
        patch.object(gradients_module, "become_shard", lambda gradient, _, parts: become_shard(gradient, None, parts))
    )


def restored_unwaited(stack: ExitStack) -> None:
    """Gradients that a loop dropped are zeroed while they are reduced."""
    restore = EarlierGradients._restore

    def restored(self: EarlierGradients, *args: Any) -> None:
        wait, self._wait = self._wait, lambda bucket: None
        try:
            restore(self, *args)
        finally:
            self._wait = wait

    stack.enter_context(patch.object(EarlierGradients, "_restore", restored))


@contextmanager
def mutated(*mutants: Mutant) -> Iterator[None]:
    """Inside, engines lack what the mutants take away."""
    with ExitStack() as stack:
        for mutant in mutants:
            mutant(stack)
        yield
