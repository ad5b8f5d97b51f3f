from __future__ import annotations

import os
import subprocess
import sys

# Bytes are of the same allocator as tensors, and come without torch.
PROGRAM = """
import resource
from paceline.materialise.freed import keep_freed_memory

keep_freed_memory()

def step():
    made = [b"1" * (4 << 20) for _ in range(8)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""


def pages(**environment: str) -> int:
    """Pages that the kernel gives in five steps, each of which allocates 8,192 pages and frees them."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=bare | environment, capture_output=True, text=True, timeout=120, check=True
    )
    return int(ran.stdout)


def test_what_a_step_freed_is_there_for_the_next() -> None:
    assert pages() < 500


def test_what_the_environment_says_of_malloc_stays() -> None:
    assert pages(MALLOC_TRIM_THRESHOLD_="1000000") > 5000
