from __future__ import annotations

import os
import socket
import threading
import time

import pytest
import torch

import paceline as pl
from paceline.comm.connect import open_transport
from paceline.materialise.freed import forget_memory
from paceline.measuring.meters import held_bytes, sent_bytes, sent_since, watching_allocations, watching_memory

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
            assert sent_since(before) == 10_500
        # What closed takes nothing from what others sent.
        assert sent_since(before) >= 0
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_the_most_memory_is_remembered_when_it_is_freed() -> None:
    size = 200 * 2**20
    forget_memory()  # what other tests freed would be taken first
    before = held_bytes(CPU)
    with watching_memory(CPU) as peak:
        assert peak() - before < 0.1 * size
        tensor = torch.ones(size, dtype=torch.uint8)
        time.sleep(0.3)
        assert held_bytes(CPU) - before > 0.9 * size
        del tensor
        assert held_bytes(CPU) - before < 0.5 * size
        assert peak() - before > 0.9 * size
    assert not [thread for thread in threading.enumerate() if "memory" in thread.name]


def test_what_is_allocated_counts_at_its_most_without_what_the_c_library_keeps() -> None:
    outside = torch.ones(1 << 20)
    with watching_allocations(CPU) as most:
        kept = torch.ones(5 << 20)
        for _ in range(3):
            passing = kept + 1
            del passing
        outside += 1
        view = kept[: 1 << 20]
        assert most() == pytest.approx(2 * (5 << 22), rel=1e-6)
        # Since then nothing came but what was there.
        assert most() == pytest.approx(5 << 22, rel=1e-6)
    assert view.numel() == 1 << 20


def share_memory() -> tuple[int, int]:
    """What 100 MiB of one's own add, and what 100 MiB do that all ranks map and have touched."""
    transport = open_transport(pl.init())
    forget_memory()
    before = held_bytes(CPU)
    own = torch.ones(100 << 20, dtype=torch.uint8)
    between = held_bytes(CPU)
    del own
    ours = transport.allocate_shared(100 << 20, torch.uint8)
    ours.sum()
    pl.barrier()
    after = held_bytes(CPU)
    pl.barrier()
    transport.close()
    return between - before, after - before


@pytest.mark.full
def test_what_ranks_share_counts_in_parts(ranks) -> None:
    for own, shared in ranks(2, share_memory):
        assert own == pytest.approx(100 << 20, rel=0.1)
        assert shared == pytest.approx(50 << 20, rel=0.1)
