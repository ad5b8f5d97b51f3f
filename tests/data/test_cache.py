from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.data import DataConfig, preparation, prepare
from paceline.data.cache import Cache
from tests.data.prose import prose

Configure = Callable[..., DataConfig]

INTERRUPTED = """
import sys, time
from paceline.data import DataConfig, preparation, prepare, tokenise

encode = tokenise._encode
def slow(*arguments):
    time.sleep(0.05)
    return encode(*arguments)
tokenise._encode = slow
tokenise.BATCH_BYTES = 1000

write = preparation.tokenise
def begin(documents, tokenizer, threshold, files, threads, advance):
    def told(size):
        print("tokenising", flush=True)
        advance(size)
    return write(documents, tokenizer, threshold, files, threads, told)
preparation.tokenise = begin
prepare(DataConfig(path=(sys.argv[1],), vocabulary=300, validation=0.2, cache=sys.argv[2]))
"""

COUNTED = """
import sys
from paceline.data import DataConfig, preparation, prepare

write = preparation.tokenise
def counted(*arguments):
    print("tokenised", flush=True)
    return write(*arguments)
preparation.tokenise = counted
corpus = prepare(DataConfig(path=(sys.argv[1],), vocabulary=300, validation=0.2, cache=sys.argv[2]))
print(corpus.folder, len(corpus.train))
"""

MEASURED = """
import resource, sys
from paceline.data import DataConfig, Tokenizer, prepare, scan
from paceline.data.tokenizer import train
scan.HELD_OUT_BYTES = scan.SAMPLE_BYTES = 1 << 20
Tokenizer(train(["warm up"], 300), "test").encode_batch(["warm up"] * 100)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(DataConfig(path=(sys.argv[1],), vocabulary=600, cache=sys.argv[2]), threads=2)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("interrupt", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_preparation_leaves_no_half_entry(
    folder: Path, configure: Configure, interrupt: signal.Signals
) -> None:
    config = configure(folder)
    process = start(INTERRUPTED, folder, config.cache)
    assert process.stdout is not None and process.stdout.readline() == "tokenising\n"
    process.send_signal(interrupt)
    _, errors = process.communicate(timeout=10)
    assert process.returncode in (-interrupt, 130)
    corpora = config.cache_folder / "corpora"
    left = [path.name for path in corpora.iterdir()]
    if interrupt == signal.SIGKILL:
        assert len(left) == 1 and left[0].endswith(".partial")
    else:
        assert left == [] and "KeyboardInterrupt" in errors
    # Other text: what the dead process left goes nevertheless.
    other = folder.with_name("other.txt")
    other.write_text(prose(1000, 9))
    first = prepare(configure(other)).folder.name
    assert {path.name for path in corpora.iterdir()} == {first}
    second = prepare(config).folder.name
    assert {path.name for path in corpora.iterdir()} == {first, second}


def test_processes_that_ask_at_once_tokenise_once(folder: Path, configure: Configure) -> None:
    config = configure(folder)
    processes = [start(COUNTED, folder, config.cache) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(lines.count("tokenised") for lines in outputs) == 1
    assert len({lines[-1] for lines in outputs}) == 1


def test_waiting_is_reported_and_ends_with_the_other_process(
    folder: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.cache.QUIET_SECONDS", 0.1)
    entered, release = threading.Event(), threading.Event()
    write, calls = preparation.tokenise, []

    def held(*arguments: object) -> str:
        calls.append(1)
        entered.set()
        assert release.wait(20)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(preparation, "tokenise", held)
    lines: list[str] = []

    def second() -> None:
        prepare(configure(folder), report=report)

    def report(line: str) -> None:
        lines.append(line)
        release.set()

    first = threading.Thread(target=prepare, args=(configure(folder),))
    first.start()
    assert entered.wait(20)
    second()
    first.join()
    assert "waiting for another process that prepares the same text" in lines[0]
    assert len(calls) == 1 and "to train on" in "\n".join(lines)


def test_same_text_under_two_names_is_tokenised_once_at_a_time(
    folder: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    write, calls = preparation.tokenise, []

    def counted(*arguments: object) -> str:
        calls.append(1)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(preparation, "tokenise", counted)
    threads = [threading.Thread(target=prepare, args=(configure(path),)) for path in (folder, copy)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prepare(configure(folder)).folder == prepare(configure(copy)).folder
    assert len(calls) == 1


def test_garbage_in_a_record_is_overwritten(folder: Path, configure: Configure) -> None:
    config = configure(folder)
    key = prepare(config).folder.name
    for record in (config.cache_folder / "seen").iterdir():
        record.write_bytes(b"\xff garbage")
    assert prepare(config).folder.name == key
    assert prepare(config).folder.name == key


@pytest.mark.full
def test_memory_stays_far_below_the_size_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    chooser = random.Random(1)
    words = ["".join(chooser.choices("abcdefgh", k=30)) for _ in range(8)]  # long words are fast to encode
    block = " ".join(chooser.choices(words, k=10_000)).encode() + b"\n"
    with path.open("wb") as file:
        for _ in range(150):
            file.write(block)
    output, errors = start(MEASURED, path, tmp_path / "cache").communicate(timeout=300)
    assert output, errors
    assert path.stat().st_size > 40e6
    assert int(output) < path.stat().st_size / 2


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system is not permitted")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_full_disk_is_refused_with_path_and_bytes(tiny_disk: Path, tmp_path: Path, configure: Configure) -> None:
    path = tmp_path / "large.txt"
    path.write_text("".join(prose(3000, seed) for seed in range(150)))
    with pytest.raises(UserError, match=rf"disk is full.* [\d.]+ MB in {tiny_disk}.*are free"):
        prepare(configure(path, cache=str(tiny_disk)))
    assert list((tiny_disk / "corpora").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "disk is full"), (errno.EROFS, "cannot write")],
)
def test_failed_writes_are_refused_and_cleaned_up(
    folder: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    def fail(*arguments: object) -> str:
        raise OSError(number, os.strerror(number))

    config = configure(folder)
    monkeypatch.setattr(preparation, "tokenise", fail)
    with pytest.raises(UserError, match=f"{message}.*{config.cache}.*PACELINE_CACHE"):
        prepare(config)
    assert list((config.cache_folder / "corpora").iterdir()) == []


def test_cache_that_cannot_be_a_folder_is_refused(folder: Path, configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to the cache folder"):
        prepare(configure(folder, cache=str(tmp_path / "file")))


def test_cache_in_a_place_that_cannot_be_is_refused(folder: Path, configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write to the cache folder"):
        prepare(configure(folder, cache=str(tmp_path / ("a" * 300) / "cache")))


def test_failed_block_leaves_the_old_entry(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    key = "0" * 32
    with cache.lock(key, None), cache.writing(key) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(ZeroDivisionError), cache.lock(key, None), cache.writing(key) as folder:
        (folder / "a").write_text("new")
        raise ZeroDivisionError
    assert (cache.entry(key) / "a").read_text() == "old"
    assert len(list((tmp_path / "corpora").iterdir())) == 1
