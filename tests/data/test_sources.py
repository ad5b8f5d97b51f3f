from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.data.sources import find


def names(root: Path, *paths: str) -> list[str]:
    return [os.path.relpath(file.path, root) for file in find(tuple(str(root / path) for path in paths)).files]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in ("b.txt", "a/z.py", "a/c.md", "a/deep/x.jsonl.gz", "B.TXT.GZ", "a/p.png", "a/noext"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")
    (root / ".git").mkdir()
    (root / ".git" / "hidden.txt").write_text("hidden")
    (root / "empty.txt").write_text("")
    (root / "gone.txt").symlink_to(root / "nowhere")
    (root / "loop").symlink_to(root)
    (root / "link.txt").symlink_to(root / "b.txt")
    return root


def test_folder_is_searched_in_sorted_order_and_the_rest_is_counted(tree: Path) -> None:
    expected = ["B.TXT.GZ", "a/c.md", "a/deep/x.jsonl.gz", "a/z.py", "b.txt", "link.txt"]
    assert names(tree, ".") == expected
    assert find((str(tree),)).ignored == {
        "(broken link)": 1,
        "(empty)": 1,
        "(hidden)": 1,
        "(no suffix)": 2,
        ".png": 1,
    }


def test_paths_keep_their_order_and_a_file_reached_twice_counts_once(tree: Path) -> None:
    assert names(tree, "b.txt", "a", "b.txt", "a/c.md") == ["b.txt", "a/c.md", "a/deep/x.jsonl.gz", "a/z.py"]


def test_globs_match_files_and_folders(tree: Path) -> None:
    assert names(tree, "a/*.m*") == ["a/c.md"]
    assert names(tree, "a/d*") == ["a/deep/x.jsonl.gz"]
    assert names(tree, "a/**") == ["a/c.md", "a/deep/x.jsonl.gz", "a/z.py"]
    assert find((str(tree / "a" / "*"),)).ignored == {"(no suffix)": 1, ".png": 1}


def test_a_name_with_brackets_is_not_taken_for_a_glob(tmp_path: Path) -> None:
    (tmp_path / "notes[1].txt").write_text("x")
    assert names(tmp_path, "notes[1].txt") == ["notes[1].txt"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", "nothing exists at .*missing.txt"),
        ("missing*.txt", "nothing exists at"),
        ("b.txt/below", "nothing exists at"),
        ("a/p.png", "suffix that is not known to hold text.*.jsonl"),
        ("empty.txt", "no text found.*1 \\(empty\\)"),
    ],
)
def test_paths_without_text_are_refused(tree: Path, path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find((str(tree / path),))


def test_folder_without_text_names_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no text found .*found nothing"):
        find((str(tmp_path),))
    (tmp_path / "a.png").write_text("x")
    with pytest.raises(UserError, match=r"found 1 \.png"):
        find((str(tmp_path),))


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder owned by a user without special rights, and the test running as one."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        if os.geteuid() == 0:
            os.seteuid(65534)
            yield Path(name)
            os.seteuid(0)
        else:
            yield Path(name)


def test_what_may_not_be_read_is_told_by_name_and_passed_over_beside_other_text(unprivileged: Path) -> None:
    closed, secret = unprivileged / "closed", unprivileged / "secret.txt"
    closed.mkdir(mode=0o000)
    secret.write_text("x")
    secret.chmod(0)
    try:
        for path in (closed, closed / "a.txt", secret, unprivileged):
            with pytest.raises(UserError, match=r"cannot read .*(closed|secret).*Permission denied"):
                find((str(path),))
        (unprivileged / "open.txt").write_text("x")
        sources = find((str(unprivileged),))
        assert [Path(file.path).name for file in sources.files] == ["open.txt"]
        assert set(sources.unreadable) == {str(closed), str(secret)}
        before = sources.fingerprint()
        secret.chmod(0o600)
        assert find((str(unprivileged),)).fingerprint() != before
    finally:
        closed.chmod(0o700)


def test_fingerprint_follows_paths_sizes_and_times(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    seen = {find((str(path),)).fingerprint()}
    assert find((str(tmp_path),)).fingerprint() in seen
    path.write_text("three")
    seen.add(find((str(path),)).fingerprint())
    os.utime(path, ns=(1, 1))
    seen.add(find((str(path),)).fingerprint())
    path.rename(tmp_path / "b.txt")
    seen.add(find((str(tmp_path),)).fingerprint())
    assert len(seen) == 4


def test_no_path_means_the_standard_library_without_tests() -> None:
    sources = find(())
    parts = {part for file in sources.files for part in Path(file.path).parts}
    assert "standard library" in sources.name
    assert not parts & {"test", "tests", "site-packages", "idle_test", "__pycache__"}
    assert {"argparse.py", "asyncio", "json"} <= parts
    assert all(file.path.endswith(".py") for file in sources.files)
    size = sources.read_size()
    assert size is not None and 5e6 < size < 30e6
