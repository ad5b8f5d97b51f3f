from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.bench.cli import main as bench
from paceline.comm.profile import Cost, Fit, HardwareProfile, Host, read_profile
from paceline.core.errors import UserError
from paceline.plan import network, profiles
from paceline.plan.arguments import PlanArguments
from paceline.plan.measured_collectives import with_collectives
from paceline.plan.network import Spread
from paceline.plan.request import request

HOST = Host("a cpu", 8, 2**36, (), "Linux", "3.12", "2.13.0")


def cost(collective: str, algorithm: str, ranks: int, alpha: float, beta: float, dtype: str = "float32") -> Cost:
    return Cost("shared memory", collective, algorithm, ranks, dtype, Fit(alpha, beta, 0.0, 0.0, 0.0, 1024, 2**25))


def profile(*costs: Cost) -> HardwareProfile:
    return HardwareProfile(HOST, (), costs)


def test_groups_of_as_many_ranks_on_a_host_take_what_the_fastest_algorithm_took() -> None:
    h100 = profiles.hardware("h100")
    found = with_collectives(
        h100,
        profile(
            cost("all_reduce", "tree", 8, 1e-6, 9e-9),
            cost("all_reduce", "ring", 8, 5e-5, 1e-9),
            cost("all_reduce", "ring", 8, 0.0, 1e-12, "bfloat16"),
            cost("all_gather", "ring", 8, 0.0, 2e-9, "bfloat16"),
        ),
        16,
        "comm.json",
    )
    host, two, pair = Spread(8, 1), Spread(8, 2), Spread(2, 1)
    assert network.seconds("all_reduce", 1e6, host, found) == pytest.approx(5e-5 + 1e-3)
    assert network.seconds("all_gather", 1e6, host, found) == pytest.approx(2e-3)
    assert network.seconds("reduce_scatter", 1e6, host, found) == network.seconds("reduce_scatter", 1e6, host, h100)
    for elsewhere in (two, pair):
        assert network.seconds("all_reduce", 1e6, elsewhere, found) == network.seconds(
            "all_reduce", 1e6, elsewhere, h100
        )


def test_a_profile_of_other_numbers_of_ranks_is_refused_and_said_how_to_measure() -> None:
    h100 = profiles.hardware("h100")
    for costs in ((), (cost("all_reduce", "ring", 3, 0.0, 1e-9),), (cost("all_reduce", "ring", 1, 0.0, 1e-9),)):
        with pytest.raises(UserError, match=r"--collectives comm.json: .* bench comm --ranks 8 --profile FILE"):
            with_collectives(h100, profile(*costs), 64, "comm.json")


@pytest.mark.full
def test_what_bench_comm_measures_a_plan_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "comm.json"
    sizes = ["--min", "64k", "--max", "1M", "--factor", "4", "--rounds", "2"]
    bench(["comm", "--op", "all_reduce", "all_gather", *sizes, "--profile", str(file)])
    capsys.readouterr()
    asked = PlanArguments(model="tiny", hardware="h100", collectives=str(file))
    measured = request(asked, 2).case
    fastest = min(
        (each.fit for each in read_profile(file).costs if each.collective == "all_reduce"),
        key=lambda fit: fit.seconds(2**22),
    )
    assert network.seconds("all_reduce", 1e6, Spread(2, 1), measured.hardware) == pytest.approx(fastest.seconds(1e6))


def test_the_terms_of_a_plan_tell_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.comm.profile import write_profile
    from paceline.plan.cli import main

    file = tmp_path / "comm.json"
    names = ("all_reduce", "all_gather", "reduce_scatter")
    write_profile(file, profile(*(cost(name, "ring", 8, 25e-6, 4e-12) for name in names)))
    main(["--model", "gpt2-124m", "--hardware", "h100", "--devices", "8", "--explain", "--collectives", str(file)])
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"25\.0 µs \+ B / 250GB/s; n = 8, h = 1; waited for \d.* \[measured between 8 ranks", said), said
