"""Data parallelism by hand: broadcast the weights, average the gradients. What `pl.parallelize` does for you.

python examples/manual_loop.py
torchrun --nproc-per-node 2 examples/manual_loop.py
"""

import torch
import torch.distributed as dist
from regression import DATA, build_model, evaluate
from torch.nn import functional as F

import paceline as pl

world = pl.init()
model = build_model(seed=world.rank).to(world.device)  # every rank starts elsewhere, on purpose
if world.world_size > 1:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # now all have rank 0's weights

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(100):
    inputs, targets = DATA.batch(step, world.device)
    mine = slice(world.rank, None, world.world_size)  # every rank its own rows
    loss = F.mse_loss(model(inputs[mine]), targets[mine])
    loss.backward()
    if world.world_size > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # the sum over ranks
            parameter.grad /= world.world_size  # the mean: as if one process had seen the whole batch
    optimizer.step()
    optimizer.zero_grad()

if world.rank == 0:
    print(f"{world.world_size} ranks, loss {evaluate(model):.9f}")
