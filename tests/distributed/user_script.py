"""A user's plain DDP script. The two lines that sparsewire needs are marked."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import sparsewire as sw  # 1

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
wire = sw.attach(model, sw.TopK(0.05), timeout=float(sys.argv[2]))  # 2
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(int(sys.argv[1])):
    inputs = torch.randn(16, 64, generator=generator)
    targets = torch.randint(0, 10, (16,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    if step == 5:
        print(f"rank {dist.get_rank()} trains as process {os.getpid()}", flush=True)
    if len(sys.argv) > 3:
        time.sleep(float(sys.argv[3]))

total = sum(p.detach().double().sum() for p in model.parameters())
print(f"done {total:.12f}", flush=True)
dist.destroy_process_group()
