"""The work of any model, from a forward and a backward pass on tensors without memory.

The model itself runs, so what it computes is what is counted: each operator with its shapes, each storage that autograd
keeps. Blocks that are alike run once.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from paceline.core.errors import UserError
from paceline.models.units import find_units
from paceline.plan.alike import Alike, arguments, place_told
from paceline.plan.example_inputs import Inputs, example_inputs
from paceline.plan.fused import FusedKernels
from paceline.plan.observed_pass import ObservedPass
from paceline.plan.packed import unpacked
from paceline.plan.roots import results_left, roots_of, without_gradient
from paceline.plan.slow_work import told_while_slow
from paceline.plan.stand_in import Result, result_of, stand_in
from paceline.plan.untraceable import failures_told
from paceline.plan.without_memory import cast, fake, without_memory
from paceline.plan.work import UnitWork, Work

_TRACED = 2
"""So many of the blocks that are alike run, and the last: the first alone saves what all of them share."""


def trace(
    model: nn.Module,
    samples: int = 1,
    *,
    length: int = 0,
    inputs: Inputs | None = None,
    precision: str = "float32",
    device: Literal["cpu", "cuda"] = "cuda",
    units: Sequence[str] = (),
) -> Work:
    """Runs one micro-batch of a model without memory and writes down what it computes and keeps.

    Args:
        model: Any module, on any device; it is left as it was.
        samples: Sequences, or other samples, of the micro-batch.
        length: Tokens of a sequence; 0: the model's longest.
        inputs: What the model is called with: a tensor, a tuple of arguments or a dictionary of named ones, whose
            first dimensions are made `samples` long. None: what is known of language models (see `example_inputs`).
        precision: What parameters and inputs are computed in, as `Strategy.precision`; "float32" leaves them as they
            are.
        device: Which kernels attention has: those of a GPU, or of a CPU.
        units: As `Strategy.units`.

    Raises:
        UserError: What the model is called with is not known, or it cannot run without memory: the message names the
            operator and its unit.
    """
    given = example_inputs(model, samples, length, inputs)
    failed: list[Exception] = []
    for skips, holds in _TRIED:
        tried = _Trace(model, given, precision, device, units, skips, holds)
        try:
            return tried.run()
        except Exception as error:
            failed.append(error)
            if not skips and not tried.guessed:
                break
    raise failed[1]


_TRIED = ((True, True), (False, True), (False, False))
"""Whether blocks alike run once, and what conditions are taken to be of which nothing is known.

Blocks that seemed alike may not be, or one that was skipped was to leave something on itself, or in a list; and what
raises on a condition, or never ends while it holds, may be meant for what it does not hold of.
"""


class _Unalike(Exception):
    """Blocks that seemed alike are not."""


class _Trace:
    def __init__(
        self,
        model: nn.Module,
        given: Any,
        precision: str,
        device: str,
        patterns: Sequence[str],
        skips: bool,
        holds: bool,
    ) -> None:
        self.model, self.given, self.device, self.skips, self.holds = model, given, device, skips, holds
        self.dtype = None if precision == "float32" else getattr(torch, precision)
        self.units = find_units(model, patterns)
        alike = Alike(model)
        self.signature = {name: alike.module(name, unit) for name, unit in self.units.items()} if skips else {}
        self.last = {signature: name for name, signature in self.signature.items()}
        self.ran: dict[Hashable, list[str]] = defaultdict(list)
        self.results: dict[Hashable, Result] = {}
        self.skipped: dict[str, Hashable] = {}
        self.guessed: set[str] = set()
        self.results_left = ""
        self.passed_back: set[str] = set()
        """Of the blocks that were skipped those that gradients came to."""

    def run(self) -> Work:
        """The work of one pass.

        Raises:
            UserError: An operator cannot run without memory.
            _Unalike: Blocks that are alike computed different things.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        with ExitStack() as stack:
            # What a model says as it runs is not part of a plan, which may be JSON for another program.
            stack.enter_context(redirect_stdout(sys.stderr))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(unpacked())
            parameters = stack.enter_context(without_memory(self.model, self.units, self.dtype))
            args, kwargs = tree_map(lambda each: fake(each, self.dtype), self.given.arguments)
            self.seen = seen = ObservedPass([*parameters, *_tensors((args, kwargs))], _shared(self.model), self.holds)
            self.guessed = seen.guessed
            for parameter in parameters:
                if parameter.requires_grad and parameter.is_leaf:
                    parameter.register_post_accumulate_grad_hook(seen.is_gradient)
            for name, unit in self.units.items():
                stack.enter_context(_replaced(unit, self._forward_of(name, unit)))
            stack.enter_context(FusedKernels(self.device))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(told_while_slow(self._how_far))
            with failures_told(seen, self.model), seen:
                with saved_tensors_hooks(seen.saved, lambda each: each):
                    output = self.model(*args, **kwargs)
                    roots = roots_of(output)
                if not roots:
                    raise UserError(without_gradient(self.model))
                self.results_left = results_left(self.model, roots, self.given.samples)
                seen.turn()
                torch.autograd.backward(roots, [torch.empty_like(each) for each in roots])
            del output, roots
        return self._work()

    def _how_far(self) -> str:
        seen, samples = self.seen, self.given.samples
        return (
            f"tracing {type(self.model).__name__} with {samples} sample{'s' * (samples > 1)}: in {seen.phase} of "
            f"{seen.unit or 'the model itself'}, {len(seen.order)} of {len(self.units)} units begun, "
            f"{seen.operators:,} operators so far"
        )

    # ---- blocks that are alike

    def _forward_of(self, name: str, unit: nn.Module) -> Callable[..., Any]:
        own = unit.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.dtype is not None and any(each.dtype == torch.float32 for each in _tensors((args, kwargs))):
                # Otherwise a list or dictionary that a unit fills stays the model's own.
                args, kwargs = tree_map(lambda each: cast(each, self.dtype), (args, kwargs))
            inputs = _tensors((args, kwargs))
            if self.seen.phase != "forward" or self.seen.unit:
                # Recomputed by the model's own checkpointing, or called by another unit.
                return own(*args, **kwargs)
            key = (self.signature[name], arguments(args, kwargs)) if self.skips else None
            asked: list[str] = []
            with self.seen.inside(name, inputs):
                skips = key in self.results and self.seen.is_told_first()
                if skips and len(self.ran[key]) >= _TRACED and self.last[self.signature[name]] != name:
                    self.skipped[name] = key
                    needs = (*inputs, *unit.parameters())
                    return stand_in(self.results[key], self.seen, needs, lambda: self.passed_back.add(name))
                before = _beside(unit, args, kwargs)
                with place_told(name, unit, lambda: asked.append(name)) if self.skips else nullcontext():
                    result = own(*args, **kwargs)
            leaves = bool(asked) or not _same(before, _beside(unit, args, kwargs))
            self.ran[key].append(name)
            storages = {each.untyped_storage()._cdata for each in inputs}
            aliases = any(each.untyped_storage()._cdata in storages for each in _tensors(result))
            if self.skips and not self.seen.changed and not aliases and not leaves:
                self.results[key] = result_of(result)
            return result

        return forward

    # ---- what was seen

    def _work(self) -> Work:
        seen = self.seen
        for name, key in self.skipped.items():
            if bool(seen.backward[self.ran[key][1]]) != (name in self.passed_back):
                raise _Unalike
        for key, names in self.ran.items():
            if any(self.skipped[name] == key for name in self.skipped) and any(
                (seen.forward[name], seen.backward[name]) != (seen.forward[names[1]], seen.backward[names[1]])
                for name in names[1:-1] or names[1:]
            ):
                raise _Unalike
        kept, inputs, attention = seen.kept(), seen.kept_where_recomputed(False), seen.kept_where_recomputed(True)
        held, whole, before = seen.held(), seen.held_with_gradients(), 0
        logits = seen.logits(self.given.vocabulary) if self.given.vocabulary else {}
        found: dict[str, UnitWork] = {}
        for name in (*seen.order, ""):
            if name in self.skipped:
                continue
            before += kept.get(name, 0)
            moments = held["forward", name], held["backward", name], whole[name]
            beyond = tuple(tuple(each - before for each in own) for own in moments)
            most = [max((0, *own)) for own in beyond]
            found[name] = UnitWork(
                name,
                tuple(seen.forward[name]),
                tuple(seen.backward[name]),
                kept.get(name, 0),
                inputs.get(name, 0),
                attention.get(name, 0),
                most[0],
                most[1],
                most[2],
                tuple(seen.forward[name][: seen.again[name]]),
                logits.get(name, 0),
                beyond,
            )
        for name, key in self.skipped.items():
            found[name] = replace(found[self.ran[key][1]], unit=name)
        order = [*seen.order, *([""] if seen.forward[""] or seen.backward[""] or kept.get("", 0) else [])]
        doubts = [told for told in (self.given.doubt, self.results_left) if told]
        if seen.guessed:
            conditions = "to hold" if self.holds else "not to hold, as it could not run with them"
            doubts.append(
                f"{', '.join(sorted(seen.guessed))} depend on values: choices, as of experts, are taken to be even, "
                "other masks to hold everywhere, sequences to be as long as they can, and numbers to be 1"
                f"{f'; and conditions {conditions}, whatever is left out by that' if seen.asked else ''}"
            )
        unknown = [
            f"the operations of {name} are not known and not counted: a step takes longer than this"
            for name in sorted(seen.unknown)
        ]
        return Work(
            tuple(found[name] for name in order),
            self.given.samples,
            self.given.tokens,
            "trace",
            (*doubts, *unknown),
            bool(_shared(self.model)),
        )


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _beside(unit: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    """What a forward may leave behind beside its result: attributes of modules, and what is in what it is given."""
    attributes = [value for part in unit.modules() for value in vars(part).values()]
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, dict))]
    return [*attributes, *(value for each in given for value in (each.values() if isinstance(each, dict) else each))]


def _same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


def _shared(model: nn.Module) -> list[Tensor]:
    """Parameters that go by several names."""
    uses = Counter(map(id, (each for _, each in model.named_parameters(remove_duplicate=False))))
    return [each for each in model.parameters() if uses[id(each)] > 1]


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
