"""Fine-tunes a BERT-like classifier on support tickets kept in a `datasets.Dataset`."""

import argparse
import os

import datasets
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed

QUEUES, VOCAB, LENGTH = 6, 600, 32


def load_tickets(count):
    """The archive: already tokenized, with the queue each ticket went to."""
    g = torch.Generator().manual_seed(2024)
    queue = torch.randint(0, QUEUES, (count,), generator=g)
    tokens = torch.randint(1, VOCAB, (count, LENGTH), generator=g)
    telling = torch.rand(count, LENGTH, generator=g) < 0.1
    tokens = torch.where(telling, queue[:, None] * 100 + tokens % 12 + 1, tokens)
    return datasets.Dataset.from_dict({"input_ids": tokens.tolist(), "labels": queue.tolist()})


def build_loaders(args, rank, world):
    tickets = load_tickets(args.tickets)
    parts = tickets.train_test_split(test_size=0.2, shuffle=True)
    parts.set_format("torch")
    train_sampler = DistributedSampler(parts["train"], num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    test_sampler = DistributedSampler(parts["test"], num_replicas=world, rank=rank, shuffle=False)
    train = DataLoader(parts["train"], batch_size=args.batch_size, sampler=train_sampler, drop_last=True)
    test = DataLoader(parts["test"], batch_size=2 * args.batch_size, sampler=test_sampler)
    return train, test


def build_model():
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=LENGTH,
        num_labels=QUEUES,
    )
    return BertForSequenceClassification(config)


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    counts = torch.zeros(2, device=device)
    for batch in loader:
        guess = model(input_ids=batch["input_ids"].to(device)).logits.argmax(-1)
        counts += torch.stack([(guess == batch["labels"].to(device)).sum(), torch.tensor(len(guess), device=device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--tickets", type=int, default=1920)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    set_seed(args.seed + rank)  # dropout

    train, test = build_loaders(args, rank, world)
    model = DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = get_linear_schedule_with_warmup(optimizer, 10, args.epochs * len(train))

    for epoch in range(args.epochs):
        train.sampler.set_epoch(epoch)
        model.train()
        for batch in train:
            loss = model(input_ids=batch["input_ids"].to(device), labels=batch["labels"].to(device)).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        score = accuracy(model.module, test, device)
        if rank == 0:
            print(f"epoch {epoch}: test accuracy {score:.3f}", flush=True)

    if rank == 0:
        model.module.save_pretrained("tickets-model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
