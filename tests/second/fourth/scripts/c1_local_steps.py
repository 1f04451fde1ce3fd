"""Inner and outer optimization: every rank takes some AdamW steps by itself, then the ranks' common change of the
weights is applied by an outer optimizer with momentum."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, CONTEXT = 64, 48


def sequences(count, seed):
    """A Markov chain of order one."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)).mul(2).softmax(-1)
    g = torch.Generator().manual_seed(seed)
    out = torch.randint(0, VOCAB, (count, CONTEXT + 1), generator=g)
    for t in range(1, CONTEXT + 1):
        out[:, t] = torch.multinomial(table[out[:, t - 1]], 1, generator=g).squeeze(-1)
    return TensorDataset(out)


class LM(nn.Module):
    def __init__(self, width=96, layers=3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, 4, 3 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, VOCAB)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, ids):
        return self.out(self.blocks(self.embed(ids) + self.position, mask=self.mask, is_causal=True))


class Outer:
    """The weights all ranks agree on, and the optimizer that moves them."""

    def __init__(self, model, lr, momentum):
        self.model = model
        self.agreed = [p.detach().clone().requires_grad_() for p in model.parameters()]
        for p in self.agreed:
            dist.broadcast(p.data, src=0)
        self.optimizer = torch.optim.SGD(self.agreed, lr=lr, momentum=momentum, nesterov=True)
        self.load()

    @torch.no_grad()
    def load(self):
        for mine, agreed in zip(self.model.parameters(), self.agreed):
            mine.copy_(agreed)

    @torch.no_grad()
    def sync(self):
        for mine, agreed in zip(self.model.parameters(), self.agreed):
            agreed.grad = agreed - mine
            dist.all_reduce(agreed.grad)
            agreed.grad /= dist.get_world_size()
        self.optimizer.step()
        self.load()


@torch.no_grad()
def perplexity(model, data, rank, world):
    (ids,) = data[rank::world]
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    sums = torch.tensor([loss.item(), ids[:, 1:].numel()], dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).exp().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--inner-steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LM()
    outer = Outer(model, lr=0.7, momentum=0.5)
    inner = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))

    data = sequences(args.samples, seed=1)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    held_out = sequences(128, seed=2)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (ids,) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            inner.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.step()
            if step % args.inner_steps == 0 or step == len(loader):
                outer.sync()
        value = perplexity(model, held_out, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: perplexity {value:.2f}", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), "lm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
