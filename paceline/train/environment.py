"""Facts about where a run takes place, so that its figures can be understood later."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from paceline.comm.world import World
from paceline.launch.cores import available_cores

PACKAGES = ("paceline", "torch", "numpy", "safetensors", "tokenizers", "PyYAML")


def environment_facts(world: World, threads: int) -> dict[str, Any]:
    """Versions, host, cores, GPUs, git commit and command line, ready for JSON.

    Args:
        world: The job.
        threads: Threads per rank.
    """
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "directory": os.getcwd(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "cuda": torch.version.cuda,
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": available_cores(),
        "gpus": gpus,
        "ranks": world.world_size,
        "ranks_per_host": world.local_world_size,
        "threads_per_rank": threads,
        "backend": world.backend,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()
