"""Character-level GPT on a made-up language, in the style of the small public trainers."""
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)

batch_size, block_size = 12, 48
n_layer, n_head, n_embd = 2, 2, 48
max_iters, warmup_iters, eval_interval = 300, 20, 100
learning_rate, min_lr = 2e-3, 2e-4
grad_clip = 1.0

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group(backend="gloo")
    ddp_rank, ddp_world_size = dist.get_rank(), dist.get_world_size()
else:
    ddp_rank, ddp_world_size = 0, 1
master_process = ddp_rank == 0
torch.manual_seed(1337)


def make_corpus(n):
    g = torch.Generator().manual_seed(0)
    syllables = ["ka", "to", "mi", "ren", "su", "vo", "lat", "ix"]
    follow = torch.softmax(2.5 * torch.randn(len(syllables), len(syllables), generator=g), dim=1)
    out, s = [], 0
    for i in range(n):
        s = torch.multinomial(follow[s], 1, generator=g).item()
        out.append(syllables[s] + (" " if i % 3 == 2 else ""))
    return "".join(out)


text = make_corpus(20_000)
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


def get_batch(split):
    source = train_data if split == "train" else val_data
    ix = torch.randint(len(source) - block_size - 1, (batch_size,))
    x = torch.stack([source[i : i + block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        layer = nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, n_layer, enable_nested_tensor=False)
        self.head = nn.Linear(n_embd, len(chars), bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(block_size), persistent=False)

    def forward(self, x, y):
        h = self.wte(x) + self.wpe(torch.arange(x.size(1)))
        logits = self.head(self.blocks(h, mask=self.mask[: x.size(1), : x.size(1)], is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT()
if ddp:
    model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


@torch.no_grad()
def estimate_loss():
    windows = torch.arange(ddp_rank, 40, ddp_world_size) * (block_size + 1)
    sums = torch.zeros(2)
    for i in windows.tolist():
        sums[0] += model(val_data[i : i + block_size][None], val_data[i + 1 : i + 1 + block_size][None])
        sums[1] += 1
    if ddp:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


t0 = time.time()
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    X, Y = get_batch("train")
    loss = model(X, Y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if (it + 1) % eval_interval == 0:
        val = estimate_loss()
        if master_process:
            print(f"iter {it + 1}: val {val:.4f}, {time.time() - t0:.1f} s, {ddp_world_size * batch_size} sequences a step")
if ddp:
    dist.destroy_process_group()
