"""Two ranks whose connection breaks once. They catch the error of their all-reduce, form a group again, repeat the
batch, and train on: `formed_again.py STORE`.
"""

import os
import socket
import sys
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn

from paceline.rank.guard import list_open_sockets

rank, store, lives, step = int(os.environ["RANK"]), dist.FileStore(sys.argv[1], 2), 1, 0
before = list_open_sockets()
dist.init_process_group("gloo", store=dist.PrefixStore("1", store), rank=rank, world_size=2)
torch.manual_seed(0)
net = nn.Linear(6, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
while step < 24:
    if rank == 1 and step == 20 and lives == 1:
        for name, descriptor in list_open_sockets().items():
            if name not in before:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                    one.getpeername()  # raises, where it only listens
                    one.shutdown(socket.SHUT_RDWR)
    try:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(torch.ones(3, 6) * rank), torch.ones(3, 1)).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
    except RuntimeError:
        dist.destroy_process_group()
        lives += 1
        dist.init_process_group("gloo", store=dist.PrefixStore(str(lives), store), rank=rank, world_size=2)
        continue
    optimizer.step()
    step += 1
assert lives == 2
dist.destroy_process_group()
