"""Several transports are opened at once: ranks tell each other where they are only once."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

import paceline as pl
from paceline.comm import connect
from paceline.comm.connect import Wanted, open_transports
from tests.ranks import RankPool

WHERE = ["hosts of ranks", "addresses of Unix sockets", "who can be reached over Unix sockets"]


def opened() -> tuple[list[str], dict[str, list[float]]]:
    """What ranks told each other, and the sum over this rank's group by each transport."""
    world, said = pl.init(), list[str]()
    tell = connect.all_gather_json

    def told(value: Any, label: str) -> list[Any]:
        said.append(label)
        return tell(value, label)

    pairs, across = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    with patch.object(connect, "all_gather_json", told):
        transports = open_transports(world, {"all": Wanted(), "pair": Wanted(pairs), "across": Wanted(across)})
    found = {}
    for name, transport in transports.items():
        buffer = torch.tensor([10.0**world.rank])
        transport.run("all_reduce", buffer, name)
        found[name] = buffer.tolist()
        transport.close()
    return said, found


@pytest.mark.parametrize(("kind", "told"), [("auto", WHERE), ("tcp", [*WHERE, "addresses of TCP sockets"])])
def test_ranks_of_several_groups_tell_once_where_they_are(ranks: RankPool, kind: str, told: list[str]) -> None:
    for rank, (said, found) in enumerate(ranks(4, opened, transport=kind)):
        assert said == told
        pair, across = [[11.0], [1100.0]][rank // 2], [[101.0], [1010.0]][rank % 2]
        assert found == {"all": [1111.0], "pair": pair, "across": across}
