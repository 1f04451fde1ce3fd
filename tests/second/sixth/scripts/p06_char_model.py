"""A character model in the manner of nanoGPT: random crops of one long text, no loader."""
import math
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
block_size = 24
batch_size = 8
max_iters = 500
eval_interval = 100
eval_iters = 10
learning_rate = 3e-3
min_lr = 3e-4
warmup_iters = 30
grad_clip = 1.0
seed = 1337
# -----------------------------------------------------------------------------

torch.set_num_threads(1)
dist.init_process_group("gloo")
ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
torch.manual_seed(seed)


def make_text(length=40000):
    words = ["lorem", "ipsum", "dolor", "sit", "amet", "elit", "sed", "tempor", "magna", "aliqua"]
    rng = np.random.default_rng(1)
    text = " ".join(words[i] for i in rng.integers(0, len(words), length // 5))
    chars = sorted(set(text))
    return np.array([chars.index(c) for c in text], dtype=np.int64), len(chars)


tokens, vocab_size = make_text()
cut = int(0.9 * len(tokens))
parts = {"train": tokens[:cut], "val": tokens[cut:]}


def get_batch(split):
    data = parts[split]
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size]) for i in ix.tolist()])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size]) for i in ix.tolist()])
    return x, y


class CharModel(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, width)
        self.wpe = nn.Embedding(block_size, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocab_size)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(block_size), persistent=False)

    def forward(self, x, y):
        h = self.wte(x) + self.wpe.weight[: x.shape[1]]
        h = self.block(h, src_mask=self.mask, is_causal=True)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(raw_model):
    raw_model.eval()
    total = sum(raw_model(*get_batch("val")) for _ in range(eval_iters)) / eval_iters
    dist.all_reduce(total)
    raw_model.train()
    return total.item() / ddp_world_size


model = DDP(CharModel())
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
t0 = time.time()
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % eval_interval == 0:
        val = estimate_loss(model.module)
        if master_process:
            print(f"iter {it}: val {val:.4f}, {time.time() - t0:.1f} s", flush=True)
    loss = model(*get_batch("train"))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()

if master_process:
    torch.save(model.module.state_dict(), "/tmp/fourth_char.pt")
dist.destroy_process_group()
