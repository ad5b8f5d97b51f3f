"""A program: a model, a loop, a strategy and a number of ranks, all of which follow from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import paceline as pl
from tests.programs.blocks import CHAINABLE, KINDS
from tests.programs.loops import OPTIMIZERS, LoopPlan
from tests.programs.models import ModelPlan


@dataclass(frozen=True)
class Program:
    """What is run."""

    model: ModelPlan
    loop: LoopPlan
    strategy: pl.Strategy
    ranks: int = 2
    seed: int = 0

    @property
    def lenient(self) -> bool:
        """Whether a stage may refuse this program where DDP would run it."""
        # Ranks with other numbers of micro-batches are told, wherever DDP would average what is not alike.
        unequal = len(set(self.loop.micro_batches[: self.ranks])) > 1 and self.loop.way != "uneven"
        return unequal or self.strategy.zero == 3 or self.strategy.share_parameters

    @property
    def edits_lost(self) -> bool:
        """Whether it edits weights by hand in low precision, where that alone may be refused at any stage."""
        return self.loop.clamps and self.strategy.low

    def features(self) -> list[str]:
        """What sets this program apart, a few words each."""
        found = [f"block: {kind}" for kind in dict.fromkeys(self.model.blocks)] if not self.model.whole else []
        for part in (self.model, self.loop):
            for name, value in _unusual(part):
                if name != "blocks":
                    short = isinstance(value, str) and value
                    found.append(f"{name}: {value}" if short else name)
        # The stage and whether parameters are shared are what a table begins with.
        apart = ("bucket_mb", "zero", "share_parameters")
        return [*found, *(f"strategy.{name}: {value}" for name, value in _unusual(self.strategy) if name not in apart)]

    def describe(self) -> str:
        """All that is needed to see what the program does, in four lines."""
        parts = [f"seed {self.seed} on {self.ranks} ranks"]
        for title, part in (("model", self.model), ("loop", self.loop), ("strategy", self.strategy)):
            always = {"model": ["blocks"], "loop": ["optimizer"], "strategy": ["zero"]}[title]
            unusual = dict(_unusual(part))
            chosen = {name: getattr(part, name) for name in [*always, *(n for n in unusual if n not in always)]}
            parts.append(f"  {title}: " + ", ".join(f"{name}={value!r}" for name, value in chosen.items()))
        return "\n".join(parts)


def _unusual(part: Any) -> Iterable[tuple[str, Any]]:
    default = type(part)()
    return [(f.name, getattr(part, f.name)) for f in fields(part) if getattr(part, f.name) != getattr(default, f.name)]


def draw(seed: int, **fixed: Any) -> Program:
    """The program of a seed; `fixed` are settings of its strategy.

    Model and loop do not follow from them, but in low precision leave out what enlarges rounding errors, and code
    outside of the model that mixes its own precision with the weights'.
    """
    draws = random.Random(seed)
    model = _model(draws)
    loop = _loop(draws, model)
    if loop.fails and (loop.way == "uneven" or model.branch == "data"):
        # Only ranks with a micro-batch would raise, or each somewhere else, and others wait for them in another call
        # than they go on to: by DDP for ever.
        loop = replace(loop, fails="")
    # Drawn apart, so that a seed's other settings are what they would be without.
    apart = random.Random(f"whole gradients {seed}")
    loop = replace(loop, edits=_rarely(apart, "none", ("rows", "views", "noise", "centred", "decayed", "largest"), 0.3))
    if apart.random() < 0.1:
        loop = replace(loop, optimizer="adafactor")
    given = ("layer", "network", "network called alone")
    model = replace(model, given=_rarely(random.Random(f"given {seed}"), "none", given, 0 if model.whole else 0.1))
    if fixed.get("precision", "float32") != "float32":
        model = replace(model, outside="none", head="inside" if "outside" in model.head else model.head)
        loop = replace(loop, optimizer="sgd", optimizers="one", teacher="none", critic=False, edits="none")
    ranks = draws.choice([2, 2, 3])
    while True:
        try:
            strategy = pl.Strategy(**(_strategy(draws) | fixed))
            break
        except pl.UserError:
            continue
    if strategy.recompute == "unit" and random.Random(f"recompute {seed}").random() < 0.4:
        strategy = replace(strategy, recompute="keep_attention")
    if strategy.gathers and strategy.accumulation != "hold":
        strategy = replace(strategy, prefetch=random.Random(f"prefetch {seed}").choice([1, 1, 1, 0, 2, 5]))
    return Program(model, loop, strategy, ranks, seed)


def _rarely(draws: random.Random, usual: Any, others: Iterable[Any], chance: float) -> Any:
    return draws.choice(list(others)) if draws.random() < chance else usual


def _model(draws: random.Random) -> ModelPlan:
    whole = _rarely(draws, "", ("attention", "linear", "sequential"), 0.05)
    if whole:
        return ModelPlan(whole=whole)
    count = draws.randint(1, 4)
    container = draws.choice(["list", "list", "dict", "attributes", "sequential"])
    ordinary = draws.random() < 0.35
    kinds = ("linear", "mlp", "attention") if ordinary else CHAINABLE if container == "sequential" else tuple(KINDS)
    plan = ModelPlan(
        blocks=tuple(draws.choice(kinds) for _ in range(count)),
        container=container,
        embedding=_rarely(draws, "table", ("frozen", "one-hot"), 0.25),
        positions=_rarely(draws, "none", ("view", "late view", "root"), 0.35),
        frozen=_rarely(draws, -1, range(count), 0.12),
        head=_rarely(draws, "inside", ("tied", "outside", "tied outside"), 0.4),
        outside=_rarely(draws, "none", ("temperature", "logit scale", "method", "loss weights"), 0.25),
    )
    if container != "sequential":
        again = tuple(draws.randrange(count) for _ in range(count + 1))
        plan = replace(
            plan,
            calls=_rarely(draws, (), [(*range(count), 0), again], 0.2),
            branch=_rarely(draws, "none", ("step", "data"), 0.2),
        )
    if plan.embedding == "one-hot" and plan.head.startswith("tied"):
        plan = replace(plan, embedding="table")
    if plan.outside == "logit scale":
        # Its loss is of hidden states, and a head would be left without gradients.
        plan = replace(plan, head="tied outside")
    return plan


def _loop(draws: random.Random, model: ModelPlan) -> LoopPlan:
    several = draws.random() < 0.5
    way = draws.choice(["accumulate", "no_sync", "backwards", "uneven"]) if several else "accumulate"
    numbers: tuple[int, ...] = (draws.randint(2, 3),) if several else (1,)
    critic = draws.random() < 0.08
    if critic and several:
        way = "no_sync"
    if way == "uneven":
        numbers = draws.choice([(1, 2, 3), (2, 0, 1), (3, 1, 0), (0, 1, 1)])
    plan = LoopPlan(
        steps=draws.randint(3, 4),
        optimizer=draws.choice([name for name in OPTIMIZERS if name != "adafactor"]),
        optimizers=_rarely(draws, "one", ("groups", "two", "alternate"), 0.25),
        zero_grad=_rarely(draws, "none", ("zeros", "model", "before", "never", "sometimes"), 0.5),
        drops=several and draws.random() < 0.12,
        micro_batches=numbers,
        way=way,
        passes=_rarely(draws, "one", ("two forwards", "retained", "summed"), 0.15),
        scales=several and draws.random() < 0.12,
        clip=_rarely(draws, 0.0, (0.1, 1.0), 0.35),
        regulariser=_rarely(draws, "none", ("before", "after", "apart before", "apart after"), 0.2),
        logging=_rarely(draws, "none", ("no grad", "grad"), 0.2),
        evaluates=_rarely(draws, "none", ("after", "between"), 0.15),
        clamps=draws.random() < 0.06,
        schedule=draws.random() < 0.2,
        fails=_rarely(draws, "", ("forward", "backward"), 0.1) if not model.whole else "",
        reads=draws.random() < 0.12,
        average=draws.random() < 0.1,
        teacher=_rarely(draws, "none", ("plain", "parallel"), 0.08),
        critic=critic,
    )
    if way == "uneven":
        # What ranks do in a micro-batch that others have not is nobody's but theirs.
        plan = replace(plan, drops=False, scales=False, evaluates="none", passes="one")
    return plan


def _strategy(draws: random.Random) -> dict[str, Any]:
    zero = draws.choice([0, 1, 2, 3])
    return {
        "zero": zero,
        "bucket_mb": draws.choice([1e-5, 1e-4, 5e-4, 25.0]),
        "accumulation": draws.choice(["auto", "auto", "auto", "each", "defer", "hold"]),
        "share_parameters": bool(zero) and draws.random() < 0.2,
        "recompute": _rarely(draws, "none", ("unit",), 0.12),
        "packing": _rarely(draws, "bucket", ("parameter", "flat"), 0.15),
        "synchronize": _rarely(draws, "overlap", ("after",), 0.15),
        "shard": _rarely(draws, 0, (1,), 0.05),
    }
