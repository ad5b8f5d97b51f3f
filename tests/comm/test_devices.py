"""Which device ranks take under torchrun, Slurm and where each is shown one GPU, with GPUs that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from paceline.comm import world as world_module
from paceline.comm.devices import Sight, choose, index_of, look, strategy_on
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy


@contextmanager
def gpus(*uuids: str) -> Iterator[None]:
    """Inside, torch sees these."""
    with (
        patch("torch.cuda.is_available", lambda: bool(uuids)),
        patch("torch.cuda.device_count", lambda: len(uuids)),
        patch("torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index])),
    ):
        yield


def sights(*seen: tuple[str, ...], wanted: str | None = None, local: tuple[int, ...] | None = None) -> list[Sight]:
    found = []
    for rank, uuids in enumerate(seen):
        with gpus(*uuids):
            local_rank = local[rank] if local else rank
            found.append(look(wanted, local_rank, max(local) + 1 if local else len(seen)))
    return found


def indices(found: list[Sight]) -> list[int]:
    return [index_of(sight.local_rank, sight.gpus) for sight in found]


def test_torchrun_shows_every_rank_all_of_its_host() -> None:
    found = sights(("a", "b"), ("a", "b"), ("c", "d"), ("c", "d"), local=(0, 1, 0, 1))
    assert choose(found) == ("cuda", "")
    assert indices(found) == [0, 1, 0, 1]


@pytest.mark.parametrize("wanted", [None, "cuda"])
def test_a_rank_that_is_shown_one_takes_it_whatever_its_number(wanted: str | None) -> None:
    found = sights(("a",), ("b",), ("c",), wanted=wanted)
    assert choose(found) == ("cuda", "")
    assert indices(found) == [0, 0, 0]


def test_one_gpu_for_two_ranks_is_no_gpu_for_each() -> None:
    kind, idle = choose(sights(("a",), ("a",)))
    assert kind == "cpu" and "GPUs stay idle" in idle and "ranks 0 and 1 see the same GPU (a)" in idle
    with pytest.raises(UserError, match=r"ranks 0 and 1 see the same GPU \(a\).*start fewer ranks"):
        choose(sights(("a",), ("a",), wanted="cuda"))


def test_too_few_are_said_with_their_rank() -> None:
    found = sights(("a", "b"), ("a", "b"), ("a", "b"))
    assert choose(found) == ("cpu", "GPUs stay idle, all ranks compute on the CPU: " + MISSING)
    with pytest.raises(UserError, match=MISSING):
        choose(sights(("a", "b"), ("a", "b"), ("a", "b"), wanted="cuda"))


MISSING = "rank 2, local rank 2, needs a GPU of its own, but sees 2"


def test_a_host_without_gpus_keeps_all_on_the_cpu() -> None:
    kind, idle = choose(sights(("a",), (), local=(0, 0)))
    assert kind == "cpu" and "rank 1, local rank 0, needs a GPU of its own, but sees 0" in idle


def test_no_gpus_anywhere_are_nothing_to_speak_of() -> None:
    assert choose(sights((), ())) == ("cpu", "")
    assert choose(sights(("a", "b"), ("a", "b"), wanted="cpu")) == ("cpu", "")


def test_ranks_ask_for_the_same() -> None:
    found = [*sights(("a", "b"), wanted="cuda"), *sights(("a", "b"), wanted="cpu")]
    with pytest.raises(UserError, match="rank 0 asks for cuda and rank 1 for cpu"):
        choose(found)
    with pytest.raises(UserError, match="expected cpu or cuda, got 'gpu'"):
        look("gpu", 0)


def test_gpus_that_no_rank_takes_are_said_to_stay_idle() -> None:
    kind, idle = choose(sights(("a", "b", "c", "d")))
    assert kind == "cuda" and idle.startswith("3 of the 4 GPUs that rank 0 sees stay idle: start 4 ranks on its host")
    two_hosts = sights(("a", "b"), ("a", "b"), ("c", "d", "e"), ("c", "d", "e"), local=(0, 1, 0, 1))
    assert choose(two_hosts)[1].startswith("1 of the 3 GPUs that rank 2 sees stay idle")
    # Who asks for GPUs by name knows how many.
    assert choose(sights(("a", "b", "c", "d"), wanted="cuda")) == ("cuda", "")


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_accelerators_are_said_to_stay_idle(kind: str) -> None:
    with patch("torch.accelerator.current_accelerator", lambda check_available: torch.device(kind)):
        assert choose([look(None, 0)]) == ("cpu", f"torch sees {kind}, which paceline does not compute on: "
                                           "it uses the CPU")  # fmt: skip


def test_a_torch_without_cuda_is_said_where_there_is_a_gpu(tmp_path: Path) -> None:
    here = tmp_path / "nvidia0"
    with patch("paceline.comm.devices._NVIDIA", here), patch("torch.version.cuda", None), gpus():
        assert choose([look(None, 0)]) == ("cpu", "")
        here.touch()
        kind, idle = choose([look(None, 0)])
        assert kind == "cpu" and "there is an NVIDIA GPU, but this torch was built without CUDA" in idle
        with pytest.raises(UserError, match=r"sees 0 \(there is an NVIDIA GPU"):
            choose([look("cuda", 0)])


# ---- joining


class Joined:
    """What `init` did, with GPUs and NCCL that are made up."""

    def __init__(self, uuids: tuple[str, ...], others: list[Sight], **env: str) -> None:
        self.calls: dict[str, Any] = {}
        store = dist.HashStore()
        torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        environment = env if "SLURM_PROCID" in env else {**torchrun, **env}

        def tell_all(sight: Sight, *rest: Any) -> list[Sight]:
            self.calls["order"] = ["devices"]
            return [*others, sight]

        def init_process_group(*args: Any, **named: Any) -> None:
            self.calls["order"].append("NCCL")
            self.calls["joined"] = args[0], named["device_id"]

        with (
            gpus(*uuids),
            patch.dict("os.environ", environment),
            patch.object(world_module, "_world", None),
            patch.object(world_module, "rendezvous", lambda *args, **named: iter([(store, 1, 2)])),
            patch.object(world_module, "tell_all", tell_all),
            patch.object(world_module.meeting, "agree", lambda *_: "a job"),
            patch.object(world_module, "share_secret", lambda *_: b""),
            patch.object(world_module.watch, "begin", lambda *_: None),
            patch("torch.cuda.set_device", lambda device: self.calls.update(set=device)),
            patch("torch.distributed.init_process_group", init_process_group),
            patch("atexit.register", lambda function: self.calls.update(at_exit=function)),
        ):
            self.world = world_module.init()


def test_one_gpu_per_task_joins_on_its_number_zero_once_all_agree() -> None:
    joined = Joined(("b",), sights(("a",)), LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    zero = torch.device("cuda", 0)
    assert joined.world.device == zero == joined.calls["set"]
    assert joined.calls["joined"] == ("cpu:gloo,cuda:nccl", zero)
    assert joined.calls["order"] == ["devices", "NCCL"]


def test_slurm_with_one_gpu_per_task() -> None:
    slurm = {
        "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "gpu[1-2]", "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }  # fmt: skip
    joined = Joined(("b",), sights(("a",)), **slurm)
    assert (joined.world.rank, joined.world.local_rank) == (1, 1)
    assert joined.world.device == torch.device("cuda", 0)


def test_torchruns_second_rank_takes_the_second() -> None:
    joined = Joined(("a", "b"), sights(("a", "b")), LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert joined.world.device == torch.device("cuda", 1) == joined.calls["set"]


def test_all_stay_on_the_cpu_where_one_has_no_gpu() -> None:
    joined = Joined(("b",), sights(()), LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert joined.world.device == torch.device("cpu") and "set" not in joined.calls
    assert joined.calls["joined"] == ("gloo", None)


# ---- the precision of a device


@pytest.mark.parametrize(
    ("device", "major", "precision"), [("cpu", 9, "float32"), ("cuda", 7, "float32"), ("cuda", 8, "bfloat16")]
)
def test_a_precision_that_is_left_to_the_device(device: str, major: int, precision: str) -> None:
    with (
        gpus("a"),
        patch("torch.cuda.current_device", lambda: 0),
        patch("torch.cuda.get_device_properties", lambda index: SimpleNamespace(major=major)),
    ):
        assert strategy_on(Strategy(precision="auto", zero=2), torch.device(device)) == Strategy(
            precision=precision,  # type: ignore[arg-type]
            zero=2,
        )
        for chosen in ("float32", "float16"):
            assert strategy_on(Strategy(precision=chosen), torch.device(device)).precision == chosen  # type: ignore[arg-type]


def test_settings_that_do_not_go_with_that_precision_are_refused_where_it_is_known() -> None:
    for strategy in (Strategy(precision="auto", reduce_in_float32=False),):
        with pytest.raises(UserError, match="precision=float32"):
            strategy_on(strategy, torch.device("cpu"))
    assert strategy_on(Strategy(precision="auto", collective="parameter_server"), torch.device("cpu")).low is False
