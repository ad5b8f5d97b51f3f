"""`pl.load`: goes on from what `pl.save` wrote, with any number of ranks, at any stage."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.folder import checkpoints_in, read_manifest
from paceline.checkpoint.given import Stateful, as_sequence, in_words, require
from paceline.checkpoint.manifest import DamagedError, Manifest
from paceline.checkpoint.module_states import persistent_buffers, set_extra_states
from paceline.checkpoint.optimizer_states import OptimizerStates
from paceline.checkpoint.plain import decode
from paceline.checkpoint.random_states import Generator, require_generators, set_random_states
from paceline.checkpoint.ranges import Ranges
from paceline.checkpoint.reader import Reader
from paceline.checkpoint.same_model import require_same_model
from paceline.checkpoint.saving import finish_earlier
from paceline.comm.control import all_gather_json
from paceline.core.errors import UserError
from paceline.engine.api import engine_of
from paceline.engine.engine import Engine
from paceline.engine.recovery import require_between_steps, weights_replaced


@dataclass(frozen=True)
class Loaded:
    """What a training goes on from.

    Attributes:
        path: The checkpoint's folder.
        step: How many steps were done.
        extra: What `pl.save` was given.
        world_size: How many ranks saved it.
        same_random: Whether this rank's random numbers go on too, as with as many ranks as saved.
    """

    path: Path
    step: int
    extra: Any
    world_size: int
    same_random: bool


@torch.inference_mode(False)
def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    scheduler: Stateful | Sequence[Stateful] = (),
    loader: Stateful | None = None,
    rng: Generator | Sequence[Generator] = (),
) -> Loaded:
    """Goes on from a checkpoint, with any number of ranks, at any stage and precision. A collective call.

    Each rank reads the elements that are its own to update, a few megabytes at a time, and checks them. With the same
    number of ranks and strategy, training goes on as if it had not stopped, to the bit. With others sums are rounded
    differently; random numbers go on only with as many ranks.

    Args:
        path: A checkpoint, or a folder of those named `step-<number>`: then the latest that is complete and undamaged.
        model: Parallel, of the same parameters.
        optimizer: Those that were saved, with the same groups of parameters; left out, weights alone are loaded.
            Their settings, such as lr, become those that were saved.
        scheduler: Those that were saved; or none.
        loader: What has a `load_state_dict`. Needs as many ranks as saved, unless they all saved the same.
        rng: Generators that were saved, which go on as all random numbers do: with as many ranks; or none.

    Returns:
        The step, `extra`, and what else is known.

    Raises:
        UserError: There is no checkpoint, none is undamaged, or it is of another model or other optimizers, which is
            told before anything has changed; the same on every rank. After damage, or where memory ran out, the weights
            are partly the checkpoint's, and are refused until another one is loaded.
        EngineError: A step is under way.

    Example:
        See `save`.
    """
    engine = engine_of(model)
    require_between_steps(engine, "pl.load", replaces=True)
    optimizers, schedulers, generators = as_sequence(optimizer), as_sequence(scheduler), as_sequence(rng)
    # A checkpoint that is being written in the background may be the one that is meant.
    finish_earlier(engine.world)

    def names() -> list[str]:
        require(optimizers, schedulers, loader)
        # What a folder holds may change meanwhile: rank 0's list is everybody's.
        return list(map(str, checkpoints_in(Path(path).expanduser()))) if engine.world.rank == 0 else []

    label = f"pl.load from {path} {in_words(optimizers, schedulers)}"
    folders = [Path(name) for name in _agree(*_attempt(names), label)[0]]
    for number, folder in enumerate(folders):
        try:
            return _load(folder, engine, optimizers, schedulers, loader, generators)
        except DamagedError as damaged:
            if number + 1 == len(folders):
                raise
            if engine.world.rank == 0:
                warnings.warn(f"{damaged}. Going on with {folders[number + 1]}, which is older", stacklevel=2)
    raise AssertionError("checkpoints_in names one at least")


def _load(
    folder: Path,
    engine: Engine,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Stateful],
    loader: Stateful | None,
    generators: Sequence[Generator],
) -> Loaded:
    """Loads one checkpoint. A collective call."""
    ranges = Ranges(engine)
    states = OptimizerStates(ranges, engine.program.parameters.all, optimizers)

    def prepare() -> tuple[Manifest, Any]:
        manifest = read_manifest(folder)
        require_same_model(manifest, engine.module, ranges)
        if optimizers:
            states.require_fit(manifest.values["optimizers"])
        if schedulers and len(schedulers) != (saved := len(manifest.values["schedulers"])):
            raise UserError(f"the checkpoint holds {saved} schedulers; pl.load was given {len(schedulers)}")
        saved_random = manifest.ranks[engine.world.rank % manifest.world_size]["random"] or {}
        require_generators(generators, len(saved_random.get("own", ())))
        return manifest, None if loader is None else _place_in_data(manifest, engine)

    prepared, error = _attempt(prepare)
    _agree(None, error, f"pl.load: the contents of {folder}")
    assert prepared is not None
    manifest, place = prepared
    engine.settle()
    engine.program.parameters.drop_pins()
    # Every rank has come this far, so that nobody still reads what is written to below.
    engine.state.begin_replacing()
    reader = Reader(folder, manifest.tensors)
    held, error = _attempt(partial(_read, reader, manifest, engine, ranges, states, optimizers, place))
    _agree(None, error, f"pl.load: what {folder} holds")
    weights_replaced(engine)
    if engine.program.collectives is not None:
        engine.program.collectives.load_residuals(held["residuals"])
    same_random = manifest.world_size == engine.world.world_size and held["random"] is not None
    if not same_random:
        held["random"] = None
    _agree(None, _taken_up(engine, schedulers, loader, generators, held), "pl.load: schedulers and loaders")
    return Loaded(folder, manifest.step, held["extra"], manifest.world_size, same_random)


def _read(
    reader: Reader,
    manifest: Manifest,
    engine: Engine,
    ranges: Ranges,
    states: OptimizerStates,
    optimizers: Sequence[Optimizer],
    place: Any,
) -> dict[str, Any]:
    """Reads this rank's elements into their places; returns all values, to be used when every rank could."""
    with torch.no_grad():
        for index, name in enumerate(ranges.names):
            ranges.fill(index, ranges.local(index), partial(reader.read_into, f"model/{name}"))
        for name, buffer in persistent_buffers(engine.module):
            buffer.copy_(reader.read(f"model/{name}").reshape(buffer.shape))
        if optimizers:
            states.load(manifest.values["optimizers"], reader)
    own = manifest.ranks[engine.world.rank % manifest.world_size]
    # What other ranks, or these in another way, have sent is not what this one will send.
    mine = (engine.world.world_size, json.loads(json.dumps(asdict(engine.strategy))))
    is_same = (manifest.world_size, manifest.strategy) == mine
    # Older checkpoints call them owed.
    residuals = own.get("residuals", own.get("owed", {})) if is_same else {}
    held = {**manifest.values, "random": own["random"], "place": place, "residuals": residuals}
    wanted = ("extra", "modules", "schedulers", "random", "place", "residuals")
    return {key: decode(held[key], reader.read) for key in wanted}


def _taken_up(
    engine: Engine,
    schedulers: Sequence[Stateful],
    loader: Stateful | None,
    generators: Sequence[Generator],
    held: dict[str, Any],
) -> UserError | None:
    """Gives everybody else their states; what they raise, such as for another version of theirs."""
    try:
        set_extra_states(engine.module, held["modules"])
        for scheduler, saved in zip(schedulers, held["schedulers"], strict=False):
            scheduler.load_state_dict(saved)
        if loader is not None:
            loader.load_state_dict(held["place"])
        # Last: what was called before may draw.
        if held["random"] is not None:
            set_random_states(held["random"], engine.world.device, generators)
    except Exception as error:
        # A user's class raises what it likes; other ranks must not go on without this one.
        return UserError(
            f"a module, scheduler, loader or generator does not take its state: {type(error).__name__}: {error}"
        )
    return None


def _place_in_data(manifest: Manifest, engine: Engine) -> Any:
    """What this rank's loader goes on from, encoded.

    Raises:
        UserError: None was saved, or other ranks' cannot be shared out.
    """
    states = [rank["loader"] for rank in manifest.ranks]
    if lacking := [rank for rank, state in enumerate(states) if state is None]:
        where = "" if len(lacking) == len(states) else f" on rank {lacking[0]}"
        raise UserError(f"the checkpoint was saved without a loader{where}: leave it out, and skip what was seen")
    if manifest.world_size == engine.world.world_size:
        return states[engine.world.rank]
    if any(state != states[0] for state in states):
        raise UserError(
            f"{manifest.world_size} ranks saved a place in the data each, which {engine.world.world_size} cannot share "
            "out: leave loader out, and skip samples by the step"
        )
    return states[0]


def _attempt(work: Callable[[], Any]) -> tuple[Any, UserError | None]:
    """What some work returns, or what it raises."""
    try:
        return work(), None
    except UserError as error:
        return None, error
    except (KeyError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        if _lacks_memory(error):
            # No fault of the checkpoint's: an older one is as large.
            told = str(error).partition("\n")[0]
            return None, UserError(f"there is not enough memory to load the checkpoint: {told or 'none is left'}")
        # What is in the files has right checksums and is still not what this version writes.
        return None, DamagedError(f"the checkpoint cannot be understood: {type(error).__name__}: {error}")


def _lacks_memory(error: Exception) -> bool:
    # Torch says so of the host's in a RuntimeError like any other.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def _agree(value: Any, error: UserError | None, label: str) -> list[Any]:
    """Every rank's value; raises on every rank what went wrong on any. A collective call."""
    mine = None if error is None else [isinstance(error, DamagedError), str(error)]
    found = all_gather_json([value, mine], label)
    wrong = [(rank, told) for rank, (_, told) in enumerate(found) if told is not None]
    if not wrong:
        return [each for each, _ in found]
    # All do the same next: try an older one, or give up.
    rank, (damaged, message) = min(wrong, key=lambda each: each[1][0])
    raise (DamagedError if damaged else UserError)(message if len(found) == 1 else f"rank {rank}: {message}") from error
