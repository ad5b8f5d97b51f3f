"""A worker hears its launcher whatever else is open."""

from __future__ import annotations

import fcntl
import json
import resource
import socket
from collections.abc import Iterator

import pytest

from paceline.launch.seat import Place, Seat, SeatLine, place_message

PLACE = Place(1, 2, 4, 0, 2, 1, "127.0.0.1:1", "/nowhere", "")


@pytest.fixture
def more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"this user may have {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("more_descriptors")
def test_a_line_whose_descriptor_is_over_1023_is_heard(monkeypatch) -> None:
    monkeypatch.setattr("os.environ", {})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 1500)) as far:
        seat, launcher = Seat(far, (1, 2)), SeatLine(ours)
        assert far.fileno() > 1023 and not seat.asks_to_leave()
        launcher.send(place_message(PLACE))
        assert seat.take_place(warm_up=lambda: None, holds="nothing") == PLACE
        assert launcher.receive() == {"wait": -1, "holds": "nothing", "done": 0}
        ours.send(json.dumps({"leave": PLACE.epoch}).encode())
        assert seat.asks_to_leave()
        launcher.end()
        assert seat.take_place(warm_up=lambda: None) is None
