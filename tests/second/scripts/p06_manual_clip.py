"""Char-level GRU language model, plain torch.distributed: broadcast once, then average gradients by hand."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn

torch.set_num_threads(1)
LENGTH, BATCH, STEPS, MAX_NORM = 32, 16, 400, 0.1


def corpus(size=200_000):
    g = torch.Generator().manual_seed(99)
    words = [torch.randint(0, 26, (int(n),), generator=g) for n in torch.randint(2, 8, (60,), generator=g)]
    order = torch.randint(0, 60, (size // 4,), generator=g).tolist()
    space = torch.tensor([26])
    return torch.cat([piece for w in order for piece in (words[w], space)])[:size]


class CharModel(nn.Module):
    def __init__(self, vocab=27, width=96):
        super().__init__()
        self.embed = nn.Embedding(vocab, 24)
        self.rnn = nn.GRU(24, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


def draw(text, generator):
    at = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=generator)
    rows = text[at[:, None] + torch.arange(LENGTH + 1)]
    return rows[:, :-1], rows[:, 1:]


def limit(parameters, max_norm):
    grads = [p.grad for p in parameters]
    norm = nn.utils.get_total_norm(grads)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm.item()


def exchange(parameters):
    world = dist.get_world_size()
    works = [dist.all_reduce(p.grad, async_op=True) for p in parameters]
    for work, p in zip(works, parameters):
        work.wait()
        p.grad.div_(world)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = CharModel()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=4e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 20) * 0.5 * (1 + math.cos(math.pi * s / STEPS))
    )
    text = corpus()
    generator = torch.Generator().manual_seed(1000 + rank)
    window = torch.zeros(2)
    for step in range(1, STEPS + 1):
        x, y = draw(text, generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = limit(parameters, MAX_NORM)
        exchange(parameters)
        optimizer.step()
        schedule.step()
        window += torch.tensor([loss.item(), norm])
        if step % 50 == 0:
            dist.all_reduce(window)
            if rank == 0:
                mean, norm = (window / 50 / world).tolist()
                print(f"step {step} loss {mean:.3f} norm {norm:.2f}", flush=True)
            window.zero_()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
