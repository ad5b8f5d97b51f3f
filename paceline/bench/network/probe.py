"""Measures the links between hosts with plain TCP sockets, as one process on each host.

Each host sends to the next and receives from the one before it, all at the same time, as they do in an all-reduce.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time

from paceline.bench.network.hosts import address

PORT = 29400
PINGS = 200
ROUNDS = 5
CONNECT_SECONDS = 10.0


def main(host: int, hosts: int, size: int) -> None:
    """Prints the round-trip time to the next host, and the seconds that `size` bytes took to this one at best."""
    with socket.create_server((address(host), PORT)) as server:
        after = _connect(address((host + 1) % hosts))
        before, _ = server.accept()
    for connection in (after, before):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data, room = bytes(size), memoryview(bytearray(min(size, 1 << 20)))
    trips = []
    for turn in range(hosts):
        for _ in range(PINGS):
            start = time.perf_counter()
            if turn == host:
                after.sendall(b"x")
                _receive(after, room, 1)
                trips.append(time.perf_counter() - start)
            elif turn == (host - 1) % hosts:
                _receive(before, room, 1)
                before.sendall(b"x")
    seconds = []
    for _ in range(ROUNDS):
        # Two turns around the ring: after the first everybody is there, by the second everybody knows.
        for _ in range(2):
            if host == 0:
                after.sendall(b"x")
            _receive(before, room, 1)
            if host:
                after.sendall(b"x")
        start = time.perf_counter()
        sender = threading.Thread(target=after.sendall, args=(data,))
        sender.start()
        _receive(before, room, size)
        seconds.append(time.perf_counter() - start)
        sender.join()
    print(json.dumps({"round_trip": statistics.median(trips), "seconds": min(seconds)}))


def _connect(host: str) -> socket.socket:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((host, PORT))
        except OSError:
            # That host is still starting.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _receive(connection: socket.socket, room: memoryview, size: int) -> None:
    while size:
        got = connection.recv_into(room[: min(size, len(room))])
        if not got:
            raise ConnectionError("the other host ended")
        size -= got


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
