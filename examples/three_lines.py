"""A plain PyTorch script made data-parallel by the three lines marked (1), (2) and (3).

python examples/three_lines.py
torchrun --nproc-per-node 2 examples/three_lines.py
"""

import torch
from regression import DATA, build_model, evaluate
from torch.nn import functional as F

import paceline as pl

world = pl.init()  # (1) join the job, or be a job of one
model = build_model(seed=0)
model = pl.parallelize(model)  # (2) same weights everywhere, gradients averaged in backward
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(100):
    inputs, targets = DATA.batch(step, world.device)
    mine = slice(world.rank, None, world.world_size)  # (3) every rank its own rows
    loss = F.mse_loss(model(inputs[mine]), targets[mine])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

if world.rank == 0:
    print(f"{world.world_size} ranks, loss {evaluate(model):.9f}")
