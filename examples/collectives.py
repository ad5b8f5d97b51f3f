"""Collectives on tensors of your own, by any algorithm, and why one was chosen.

python examples/collectives.py
torchrun --nproc-per-node 2 examples/collectives.py
"""

import torch

import paceline as pl
from paceline import comm

world = pl.init(device="cpu")
tensor = torch.full((1_000_000,), 1.0 + world.rank)

comm.all_reduce(tensor, scale=1 / world.world_size)  # in place: the mean over ranks, by what should be fastest
moved = comm.all_reduce(tensor, "ring")  # the sum, by one of your choice; tells bytes that this rank sent and received
choice = comm.why("all_reduce", tensor.nbytes)  # what was measured, and what each algorithm would take

if world.rank == 0:
    print(f"{world.world_size} ranks, sum {tensor[0]:g}, {moved.sent} bytes sent\n{choice}")
