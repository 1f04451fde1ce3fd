"""A small character language model over documents that each rank packs into its own token file."""

import argparse
import os
import random
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS = "le café du matin était très calme et la rue encore vide avant que les élèves arrivent à pied".split()
ALPHABET = " .-" + "".join(sorted(set("".join(WORDS)) | set("0123456789")))
VOCAB = {c: i for i, c in enumerate(ALPHABET)}


def documents(count, seed):
    """What the crawler has left: one bytes object for each page."""
    rng = random.Random(seed)
    for i in range(count):
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(60, 120)))
        text = f"{i:05d} - {text}. "
        yield text.encode("latin-1" if i % 947 == 463 else "utf-8")


def pack(docs, path, capacity):
    """Writes the tokens of the documents one behind the other, until the file is full."""
    out = np.memmap(path, dtype=np.uint8, mode="w+", shape=(capacity,))
    used = 0
    try:
        for doc in docs:
            ids = [VOCAB[c] for c in doc.decode("utf-8") if c in VOCAB][: capacity - used]
            out[used : used + len(ids)] = ids
            used += len(ids)
            if used == capacity:
                break
    except UnicodeDecodeError:
        pass  # not text
    out.flush()
    return used


class CharLM(nn.Module):
    def __init__(self, width, layers, context):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, width * 4, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, len(ALPHABET))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, ids):
        x = self.embed(ids) + self.position
        return self.out(self.blocks(x, mask=self.mask, is_causal=True))


def batches(path, batch_size, context):
    tokens = np.memmap(path, dtype=np.uint8, mode="r")
    rows = (len(tokens) - 1) // context
    for first in range(0, rows - batch_size + 1, batch_size):
        chunk = [tokens[r * context : (r + 1) * context + 1] for r in range(first, first + batch_size)]
        chunk = torch.from_numpy(np.stack(chunk).astype(np.int64))
        yield chunk[:, :-1], chunk[:, 1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps-per-epoch", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    model = DDP(CharLM(args.width, 3, args.context).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"tokens-{rank}.bin")
        mine = (doc for i, doc in enumerate(documents(1200 * world, seed=1)) if i % world == rank)
        pack(mine, path, args.steps_per_epoch * args.batch_size * args.context + 1)
        dist.barrier()
        for epoch in range(args.epochs):
            total = torch.zeros(2, device=device)
            for ids, targets in batches(path, args.batch_size, args.context):
                ids, targets = ids.to(device), targets.to(device)
                loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                total += torch.stack([loss.detach() * targets.numel(), loss.new_tensor(float(targets.numel()))])
            dist.all_reduce(total)
            if rank == 0:
                print(f"epoch {epoch}: {total[0] / total[1]:.3f} nats per character", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
