from __future__ import annotations

import os
import socket

import torch

from paceline.bench.meters import peak_bytes, resident_bytes, sent_bytes

CPU = torch.device("cpu")


def test_bytes_sent_are_those_of_tcp_sockets_both_ways() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        pair = socket.socketpair()
        with client, peer, pair[0], pair[1]:
            before = sent_bytes()
            client.sendall(b"x" * 10_000)
            peer.sendall(b"y" * 500)
            pair[0].sendall(b"not tcp")
            assert peer.recv(10_000, socket.MSG_WAITALL) + client.recv(500, socket.MSG_WAITALL)
            assert sent_bytes() - before == 10_500
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_peak_stays_when_memory_is_freed() -> None:
    size = peak_bytes(CPU) - resident_bytes(CPU) + 200 * 2**20
    before = resident_bytes(CPU)
    tensor = torch.ones(size, dtype=torch.uint8)
    assert resident_bytes(CPU) - before > 0.9 * size
    del tensor
    assert resident_bytes(CPU) - before < 0.5 * size
    assert peak_bytes(CPU) - before > 0.9 * size
