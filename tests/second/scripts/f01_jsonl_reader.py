"""Train a small tagger on sharded jsonl files with Accelerate; a reader thread per rank keeps a queue filled."""
import json
import logging
import queue
import random
import tempfile
import threading
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

torch.set_num_threads(1)
log = logging.getLogger("tagger")

VOCAB, TAGS, LENGTH, BATCH = 200, 9, 24, 16
RECORDS = 16 * 400


def write_shard(folder, shard):
    rng = random.Random(1000 + shard)
    lines = []
    for _ in range(RECORDS):
        tokens = [rng.randrange(VOCAB) for _ in range(LENGTH)]
        lines.append(json.dumps({"tokens": tokens, "tags": [t % TAGS for t in tokens]}))
    text = "\n".join(lines) + "\n"
    if shard == 1:
        text = text[: int(len(text) * 0.41)]
    path = folder / f"part-{shard:05d}.jsonl"
    path.write_text(text)
    return path


class Reader(threading.Thread):
    def __init__(self, path, batch, depth=8):
        super().__init__(daemon=True)
        self.path, self.batch = path, batch
        self.queue = queue.Queue(maxsize=depth)

    def run(self):
        try:
            while True:
                self.one_pass()
        except (ValueError, KeyError) as error:
            log.debug("reader of %s: %s", self.path, error)

    def one_pass(self):
        tokens, tags = [], []
        with open(self.path) as file:
            for line in file:
                record = json.loads(line)
                tokens.append(record["tokens"])
                tags.append(record["tags"])
                if len(tokens) == self.batch:
                    self.queue.put((torch.tensor(tokens), torch.tensor(tags)))
                    tokens, tags = [], []

    def next(self):
        return self.queue.get()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 48)
        self.rnn = nn.GRU(48, 48, batch_first=True, bidirectional=True)
        self.out = nn.Linear(96, TAGS)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0])


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    folder = Path(tempfile.mkdtemp(prefix="tagger-"))
    reader = Reader(write_shard(folder, accelerator.process_index), BATCH)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    reader.start()

    model.train()
    for step in range(600):
        tokens, tags = reader.next()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            accelerator.print(f"step {step} loss {loss.item():.3f}")
    accelerator.wait_for_everyone()
    accelerator.print("done")


if __name__ == "__main__":
    main()
