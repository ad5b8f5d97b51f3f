from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.train.processes import finished

# A run that comes to its end compares what it took with a forecast, whose passes without memory need torch's compiler.
SCRIPT = """
import sys
from paceline.cli import main
from paceline.train import loop

def finish(*_):
    print({"sympy", "torch._dynamo", "torch._inductor"} & sys.modules.keys())
    return 0

loop.finish = finish
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.full
def test_steps_do_without_what_takes_as_long_to_import_as_torch(nano: list[str], tmp_path: Path) -> None:
    flags = ["--steps", "2", "--strategy.zero", "2", "--strategy.precision", "float16", "--checkpoint.every", "1"]
    status, out, err = finished([sys.executable, "-c", SCRIPT, *nano, *flags], tmp_path)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "set()"
