"""Models on the meta device are made unit by unit: the same as elsewhere, in a unit's memory."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import paceline as pl
from paceline.bench.meters import held_bytes, watching_memory
from paceline.comm.transport import CommunicationError
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy
from paceline.engine.parameters import Parameters
from tests.engine.models import STAGES, WORLDS, Stack, assert_same, in_worlds, snapshot, stages, train
from tests.engine.test_peak import MIB
from tests.quick import diagonal, full


class Turned(nn.Module):
    """Multiplies by what a buffer that is not saved says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("angle", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.angle.copy_(torch.linspace(0.1, 1, len(self.angle), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angle.cos()


class Block(nn.Module):
    """Initialises a part of itself anew, when its parts are made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.turned = Turned(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.out.bias)
        nn.init.uniform_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) * self.scale
        y, _ = self.attention(*(self.turned(x).unsqueeze(0),) * 3, need_weights=False)
        return self.out(y.squeeze(0))


class Varied(nn.Module):
    """A tied parameter, a frozen one, a scalar of the model itself, buffers that are saved and that are not."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.before, self.head = nn.Linear(2, width, bias=False), nn.Linear(2, width, bias=False)
        self.before.weight = self.head.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.empty(()))
        self.steps: Tensor
        self.register_buffer("steps", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.steps.zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.inner(x))
        for block in self.blocks:
            x = x + block(x)
        return self.scale * torch.nn.functional.linear(x, self.head.weight.t())


class Plain(Varied):
    """Without statistics of a batch, which ranks' parts of it do not have in common."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width)
        for block in self.blocks:
            block.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.inner(x))
        for block in self.blocks:
            x = x + block.out(block.turned(block.norm(x) * block.scale))
        return self.scale * torch.nn.functional.linear(x, self.head.weight.t())


def built(cls: Callable[[], nn.Module], device: str = "cpu", seed: int = 0) -> nn.Module:
    """A model in fp64."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(seed)
        with torch.device(device):
            return cls()
    finally:
        torch.set_default_dtype(torch.float32)


def on_meta(cls: Callable[[], nn.Module]) -> nn.Module:
    """A model on the meta device, and random numbers that only rank 0 has in common with `built`."""
    model = built(cls, "meta")
    torch.manual_seed(pl.init().rank)
    return model


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {**snapshot(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def made_and_trained(strategy: Strategy, cls: Callable[[], nn.Module], **given: Any) -> tuple[Any, ...]:
    model = on_meta(cls)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pl.parallelize(model, strategy, **given)
    same = all(parameters[name] is p for name, p in model.named_parameters(remove_duplicate=False))
    trains = [p.requires_grad for p in parameters.values()]
    before = everything(model)
    (after,) = train(model, 2) if cls is not Varied else ({},)
    pl.release(model)
    return same, trains, before, after


@in_worlds(WORLDS, cls={cls.__name__: cls for cls in (Varied, Plain)})
def test_it_is_the_model_that_its_constructor_makes_elsewhere(ranks, strategy, n, cls) -> None:
    reference = built(cls)
    trains = [p.requires_grad for _, p in reference.named_parameters(remove_duplicate=False)]
    made = everything(reference)
    (trained,) = train(reference, 2) if cls is not Varied else ({},)
    for same, found, before, after in ranks(n, made_and_trained, strategy, cls):
        assert same and found == trains
        assert_same(before, made, atol=0)
        assert_same(after, trained)


def small_normal(module: nn.Module) -> None:
    """Like Hugging Face's `_init_weights`: by way of `data`, and to a part of a part."""
    for name, parameter in module.named_parameters():
        if name == "out.weight":
            parameter.data.normal_(std=0.01)
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(std=0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()
    elif isinstance(module, nn.MultiheadAttention):
        nn.init.normal_(module.in_proj_weight)
        module.in_proj_bias.zero_()
    elif isinstance(module, Turned):
        module.angle = torch.arange(len(module.angle), dtype=torch.float64)
    elif hasattr(module, "scale"):
        nn.init.constant_(module.scale, 0.5)
        if isinstance(module, Varied):
            module.steps.fill_(3)


@in_worlds({name: (strategy, n) for name, strategy in STAGES.items() for n in (1, 2)})
def test_a_function_initialises_as_model_apply_does(ranks, strategy, n) -> None:
    reference = built(Plain)
    torch.manual_seed(0)
    with torch.no_grad():
        reference.apply(small_normal)
    expected = everything(reference)
    for _, _, before, _ in ranks(n, given_init, strategy):
        assert_same(before, expected, atol=0)


def given_init(strategy: Strategy) -> tuple[Any, ...]:
    return made_and_trained(strategy, Plain, init=small_normal)


# ---- weights


def stored(folder: Path, kind: str) -> tuple[Path, dict[str, Tensor]]:
    """Weights of `Plain` on disk, in one file or two with an index, tied ones once; and what they are."""
    model = built(Plain, seed=5)
    state = snapshot(model)
    tensors = {name: value.contiguous() for name, value in state.items() if name != "before.weight"}
    if kind == "file":
        save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors", everything(model)
    names = sorted(tensors)
    files = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    if kind == "index":
        save_file({"inner.weight": torch.ones(1)}, folder / "other.safetensors")
        index = {"weight_map": {name: file for file, held in files.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder, everything(model)


@pytest.mark.parametrize(("strategy", "kind"), diagonal(STAGES, ["file", "folder", "index"]))
def test_weights_are_read_from_disk(ranks, tmp_path: Path, strategy, kind) -> None:
    path, expected = stored(tmp_path, kind)
    reference = built(Plain)
    reference.load_state_dict(expected, strict=False)
    (trained,) = train(reference, 2)
    for n in (1, 2):
        for same, _, before, after in ranks(n, from_disk, strategy, path):
            assert same
            assert_same(before, expected, atol=0)
            assert_same(after, trained)


def from_disk(strategy: Strategy, path: Path) -> tuple[Any, ...]:
    # Only rank 0 reads.
    given = path if pl.init().rank == 0 else "nowhere"
    return made_and_trained(strategy, Plain, weights=given)


def refused(cls: Callable[[], nn.Module], given: dict[str, Any]) -> str:
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(on_meta(cls), Strategy(zero=3), **given)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_weights_that_do_not_fit_are_named_on_every_rank(ranks, tmp_path: Path) -> None:
    path, _ = stored(tmp_path, "file")
    tensors = {name: value for name, value in snapshot(built(Plain)).items() if name != "before.weight"}
    del tensors["inner.bias"], tensors["head.weight"]
    tensors |= {"inner.weight": torch.ones(3), "left.over": torch.ones(1)}
    save_file(tensors, path)
    for message in ranks(2, refused, Plain, {"weights": path}):
        assert "missing: inner.bias, before.weight" in message
        assert "not in the model: left.over" in message
        assert "of another shape: inner.weight ([3] in the file, [6, 4] in the model)" in message


def test_weights_that_are_not_there_twice_there_or_damaged_are_errors(ranks, tmp_path: Path) -> None:
    assert "no safetensors file" in ranks(1, refused, Plain, {"weights": tmp_path})[0]
    path, _ = stored(tmp_path, "file")
    (tmp_path / "copy.safetensors").write_bytes(path.read_bytes())
    assert "is in" in ranks(1, refused, Plain, {"weights": tmp_path})[0]
    path.write_bytes(path.read_bytes()[:100])
    assert "cannot be read as safetensors" in ranks(1, refused, Plain, {"weights": path})[0]


# ---- in part, in low precision


def made_in(strategy: Strategy, device: Callable[[int], str]) -> dict[str, Tensor]:
    rank = pl.init().rank
    model = built(Plain, device(rank), seed=rank)
    torch.manual_seed(rank)
    pl.parallelize(model, strategy)
    state = everything(model)
    pl.release(model)
    return state


def only_rank_0(rank: int) -> str:
    return "meta" if rank else "cpu"


def not_rank_0(rank: int) -> str:
    return "cpu" if rank else "meta"


@pytest.mark.parametrize(
    ("strategy", "device"), diagonal(STAGES, {"only rank 0": only_rank_0, "not rank 0": not_rank_0})
)
def test_some_ranks_may_have_values_already(ranks, strategy, device) -> None:
    expected = everything(built(Plain))
    for found in ranks(3, made_in, strategy, device):
        assert_same(found, expected, atol=0)


def with_real_buffers(strategy: Strategy) -> dict[str, Tensor]:
    model = built(Plain)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = meta
    model.before.weight = model.head.weight
    with torch.no_grad():
        for block in model.blocks:
            block.turned.angle.fill_(7)
    # What is here already is not initialised.
    for block in model.blocks:
        block.turned.reset_parameters = None
    torch.manual_seed(0)
    pl.parallelize(model, strategy)
    state = everything(model)
    pl.release(model)
    return state


@stages
def test_buffers_that_have_values_keep_them(ranks, strategy) -> None:
    reference = built(Plain)
    for block in reference.blocks:
        block.turned.angle.fill_(7)
    for found in ranks(2, with_real_buffers, strategy):
        assert_same(found, everything(reference), atol=0)


def made_in_fp32(strategy: Strategy) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Stack()
    torch.manual_seed(pl.init().rank)
    pl.parallelize(model, strategy)
    state = snapshot(model)
    pl.release(model)
    return state


@stages
def test_masters_have_the_values_in_full(ranks, strategy) -> None:
    torch.manual_seed(0)
    expected = snapshot(Stack())
    for n in (1, 2):
        for found in ranks(n, made_in_fp32, replace(strategy, precision="bfloat16")):
            assert_same(found, expected, atol=0)


# ---- what is refused


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.register_buffer("turns", torch.ones(2), persistent=False)


class Whole(Stack):
    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def half(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
        module.weight[0].fill_(1)


def not_integers(module: nn.Module) -> None:
    if not isinstance(module, Varied):
        (getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", int))()
    else:
        nn.init.ones_(module.scale)


def another_parameter(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight, module.bias = nn.Parameter(torch.ones_like(module.weight)), None


def too_late(module: nn.Module) -> None:
    if isinstance(module, Varied):
        nn.init.zeros_(module.blocks[0].out.bias)
        module.reset_parameters()
    else:
        not_integers(module)


def raises(module: nn.Module) -> None:
    raise pl.UserError("no such distribution")


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "nothing": (Bare, {}, "nothing gives the model (Bare) its turns, as it has no reset_parameters()"),
    "the whole model": (Whole, {}, "reset_parameters of the model (Whole) is about several units"),
    "in part": (Stack, {"init": half}, "init left inner.weight without values"),
    "integers": (Varied, {"init": not_integers}, "init left steps without values"),
    "another": (Stack, {"init": another_parameter}, "init put another parameter in the place of inner."),
    "too late": (Varied, {"init": too_late}, "init wrote to blocks.0.out.bias when its unit was done"),
    "raises": (Stack, {"init": raises}, "no such distribution\nwhile inner (Linear) was initialised"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_leave_a_model_half_made_is_refused(ranks, case) -> None:
    cls, given, expected = REFUSED[case]
    for n in (1, 2):
        for message in ranks(n, refused, cls, given):
            assert expected in message


def with_values(given: dict[str, Any]) -> str:
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(Stack(), **given)
    return str(caught.value)


def some_ranks() -> str:
    given = {"weights": "nowhere"} if pl.init().rank == 0 else {}
    return refused(Stack, given)


def test_arguments_that_contradict_each_other_are_errors(ranks) -> None:
    for given in ({"init": raises}, {"weights": "nowhere"}):
        assert "this one has values" in ranks(1, with_values, given)[0]
    for message in ranks(2, some_ranks):
        assert "weights are given on some ranks only" in message


def fails_on_rank_1() -> str:
    def init(module: nn.Module) -> None:
        if pl.init().rank == 1:
            raise ValueError("out of luck")
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    with pytest.raises((CommunicationError, ValueError)) as caught:
        pl.parallelize(on_meta(Stack), init=init)
    return str(caught.value)


def test_ranks_are_told_that_one_could_not_initialise(ranks) -> None:
    others, own = ranks(2, fails_on_rank_1)
    assert own == "out of luck"
    assert "rank 1 gave up: ValueError: out of luck" in others


# ---- memory

WIDTH, BLOCKS = 256, 8


class Wide(nn.Module):
    """A large tied embedding and blocks of two parameters."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS, words: int = 2 * WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight


class Live(TorchDispatchMode):
    """Adds up the bytes of tensors that were made inside and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {
            t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if torch.is_tensor(tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: found for key, found in self._live.items() if not found[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return out


def most_bytes(path: str | None) -> tuple[int, int, int]:
    """Bytes of tensors at most, of this rank's shards, and of the largest unit."""
    with torch.device("meta"):
        model = Wide()
    filled: list[int] = []
    assign_slots = Parameters.assign_slots

    def note(parameters: Parameters, schedule: Schedule) -> None:
        filled.append(live.most)
        assign_slots(parameters, schedule)

    # Then the engine takes what its steps need, to gather units in.
    with Live() as live, patch.object(Parameters, "assign_slots", note):
        pl.parallelize(model, Strategy(zero=3), weights=path)
    engine = pl.engine_of(model)
    sizes = [sum(engine.layout.slots[i].spec.numel * 4 for i in engine.layout.slots_of(u)) for u in engine.layout.units]
    shards = sum(buffer.bytes for buffer in engine.schedule.buffers() if buffer.kind in ("parameters", "master"))
    # What peers read is not allocated by torch.
    seen = filled[0] + (shards if engine.program.collectives is not None else 0)
    pl.release(model)
    return seen, shards, max(sizes)


@pytest.mark.parametrize(("n", "reads"), diagonal([2, 4], [True, False]))
def test_a_rank_never_holds_more_than_its_shards_and_twice_the_largest_unit(ranks, tmp_path, n, reads) -> None:
    path = str(tmp_path / "weights.safetensors") if reads else None
    if reads:
        tensors = {name: value for name, value in Wide().state_dict().items() if name != "head.weight"}
        save_file(tensors, str(path))
    for most, shards, largest in ranks(n, most_bytes, path):
        whole = 4 * sum(p.numel() for p in Wide().parameters())
        assert shards < whole / n + 4096 * n
        # One tensor at a time lies in the file, which is mapped: see the test below.
        mapped = 4 * 2 * WIDTH * WIDTH if reads else 0
        assert shards + largest < most < shards + 2 * largest + mapped + 16384


def held_at_most(paths: dict[int, str | None]) -> tuple[float, float]:
    """(measured, predicted) MiB that a rank takes at most to make the last of some models; by their blocks, weights."""
    cpu = torch.device("cpu")
    # The first is small: kernels and the C library take buffers of their own when they are first used.
    for blocks, path in paths.items():
        with torch.device("meta"):
            model = Wide(768, blocks, 768)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pl.barrier()
        base = held_bytes(cpu)
        with watching_memory(cpu) as most:
            pl.parallelize(model, Strategy(zero=3), weights=path)
            peak = most()
        kinds = ("parameters", "unsharded")
        held = sum(b.bytes for b in pl.engine_of(model).schedule.buffers() if b.kind in kinds)
        pl.barrier()
        pl.release(model)
    return (peak - base) / MIB, held / MIB


@pytest.mark.parametrize("reads", [full(False), True])
def test_the_memory_of_units_is_given_back(ranks, tmp_path: Path, reads) -> None:
    paths = {blocks: str(tmp_path / f"{blocks}.safetensors") if reads else None for blocks in (2, 12)}
    for blocks, path in paths.items():
        if path is not None:
            save_file({k: v for k, v in Wide(768, blocks, 768).state_dict().items() if k != "head.weight"}, path)
    for measured, held in ranks(2, held_at_most, paths):
        # All parameters take 56 MiB, those of a unit 4.5.
        assert held < 42
        assert measured < held + 9
