"""Several micro-batches per optimizer step, of which only the last communicates; the gradient norm is clipped.

python examples/accumulation.py
torchrun --nproc-per-node 2 examples/accumulation.py
"""

import torch
from regression import DATA, build_model, evaluate
from torch.nn import functional as F

import paceline as pl

MICRO_BATCHES = 4

world = pl.init()
model = pl.parallelize(build_model(seed=0), pl.Strategy(bucket_mb=1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(100):
    inputs, targets = (rows[world.rank :: world.world_size] for rows in DATA.batch(step, world.device))
    micro_batches = zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)
    for x, y in pl.accumulate(model, micro_batches):
        loss = F.mse_loss(model(x), y) / MICRO_BATCHES
        loss.backward()
    pl.clip_grad_norm_(model, 1e6)
    optimizer.step()
    optimizer.zero_grad()

if world.rank == 0:
    print(f"{world.world_size} ranks, loss {evaluate(model):.9f}")
