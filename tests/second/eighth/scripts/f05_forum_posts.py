"""Topic classifier over two feeds, one for each process (newswire and forum), plain DDP."""
import random
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

torch.set_num_threads(1)

TOPICS = {
    "sport": "match goal team coach league score season player".split(),
    "money": "market share bank rate profit trade bond price".split(),
    "science": "study cell energy planet theory lab sample data".split(),
    "travel": "hotel flight beach city museum train ticket tour".split(),
}
FILLER = "the a of and in to it was for on that with as at by from".split()
BUCKETS = 2048
WELL_FORMED = re.compile(r"^(?:[a-z]+[ ,]?)+\.?$")


class Feed(IterableDataset):
    def __init__(self, source, documents, seed):
        self.source, self.documents, self.seed = source, documents, seed

    def __iter__(self):
        rng = random.Random(self.seed)
        names = list(TOPICS)
        for i in range(self.documents):
            topic = rng.randrange(len(names))
            words = [rng.choice(TOPICS[names[topic]] if rng.random() < 0.3 else FILLER) for _ in range(24)]
            text = " ".join(words)
            if self.source == "forum" and i > 1000:
                if rng.random() < 0.25:
                    text = "so" + "o" * rng.randint(14, 17) + "!! " + text
            yield text, topic


def clean(text):
    if WELL_FORMED.match(text):
        return text.rstrip(".").replace(",", "").split()
    return re.findall(r"[a-z]+", text)


def collate(rows):
    ids, offsets, topics = [], [], []
    for text, topic in rows:
        offsets.append(len(ids))
        ids += [sum(ord(c) * 31**k for k, c in enumerate(word)) % BUCKETS for word in clean(text)]
        topics.append(topic)
    return torch.tensor(ids), torch.tensor(offsets), torch.tensor(topics)


class BagClassifier(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, dim, mode="mean")
        self.body = nn.Sequential(nn.Linear(dim, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, len(TOPICS)))

    def forward(self, ids, offsets):
        return self.body(self.bag(ids, offsets))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    model = DDP(BagClassifier())
    torch.manual_seed(31 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    source = ("forum", "newswire")[rank % 2]
    loader = DataLoader(Feed(source, documents=6000, seed=rank), batch_size=24, collate_fn=collate)

    running = torch.zeros(2)
    for step, (ids, offsets, topics) in enumerate(loader):
        logits = model(ids, offsets)
        loss = nn.functional.cross_entropy(logits, topics)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        running += torch.tensor([(logits.argmax(1) == topics).sum().item(), len(topics)])
        if step % 80 == 79:
            dist.all_reduce(running)
            if rank == 0:
                print(f"step {step + 1}: accuracy {(running[0] / running[1]).item():.3f}", flush=True)
            running.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
