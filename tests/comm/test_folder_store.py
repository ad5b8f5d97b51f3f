"""Where ranks of a host meet: what is set is found, by Python and by torch's own code, and waits end in time."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.comm.folder_store import FolderStore


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.text(min_size=1, max_size=20), value=st.binary(max_size=100))
def test_what_is_set_last_is_found(tmp_path: Path, key: str, value: bytes) -> None:
    store = FolderStore(tmp_path / "store")
    store.set(key, b"before")
    store.set(key, value)
    assert store.get(key) == value and store.check([key])
    assert all(path.suffix == ".key" for path in (tmp_path / "store").iterdir())


def test_torch_finds_what_another_sets_while_it_waits(tmp_path: Path) -> None:
    # Torch does not keep them.
    stores = [FolderStore(tmp_path / "store") for _ in range(2)]
    mine, theirs = (dist.PrefixStore("job/a", store) for store in stores)
    setting = threading.Timer(0.05, lambda: theirs.set("rank 1", "here"))
    setting.start()
    mine.wait(["rank 1"], timedelta(seconds=60))
    assert mine.get("rank 1") == b"here" and not mine.check(["rank 2"])
    setting.join()


def test_what_is_never_set_is_an_error_in_time(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    store.set_timeout(timedelta(seconds=0.1))
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"0\.1 s for a/b"):
        store.get("a/b")
    with pytest.raises(RuntimeError, match=r"0\.05 s for x/c"):
        dist.PrefixStore("x", store).wait(["c"], timedelta(seconds=0.05))
    assert time.monotonic() - began < 30


def test_nobody_else_may_look(tmp_path: Path) -> None:
    FolderStore(tmp_path / "store")
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
