"""Keyword spotting on short recordings. Every rank reads the recordings of its own speakers."""
import argparse
import math

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

RATE = 400


class Recordings(Dataset):
    """Recordings of two seconds, of which each epoch takes another half second."""

    def __init__(self, speakers, per_speaker=96):
        self.clips, self.words, self.epoch = [], [], 0
        for speaker in speakers:
            rng = np.random.default_rng(1000 + speaker)
            for i in range(per_speaker):
                word = i % 4
                t = np.arange(2 * RATE) / RATE
                clip = np.sin(2 * math.pi * (20 + 25 * word + speaker) * t) + 0.3 * rng.standard_normal(2 * RATE)
                if speaker == 5 and i == 17:  # the microphone was unplugged
                    clip[RATE // 2 :] = 0.0
                self.clips.append(clip.astype(np.float32))
                self.words.append(word)
        self.speakers = speakers

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, index):
        rng = np.random.default_rng((self.epoch, self.speakers[0], index))
        length = RATE // 2
        if self.epoch < 2:
            start = rng.integers(0, length // 2)
        else:
            start = rng.integers(length // 2, 2 * RATE - length)
        return torch.from_numpy(self.clips[index][start : start + length].copy()), self.words[index]


def featurize(wave, frame=20):
    frames = wave.unfold(1, frame, frame)
    spectrum = torch.fft.rfft(frames, dim=-1).abs()
    spectrum = spectrum - spectrum.mean(dim=(1, 2), keepdim=True)
    return (spectrum / spectrum.std(dim=(1, 2), keepdim=True)).transpose(1, 2)


class Spotter(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(11, width, 3, padding=1), nn.GELU(), nn.Conv1d(width, width, 3, padding=1), nn.GELU()
        )
        self.head = nn.Linear(width, 4)

    def forward(self, features):
        return self.head(self.body(features).mean(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    data = Recordings(list(range(rank, 6, world)))
    shuffle = torch.Generator().manual_seed(100 + rank)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, generator=shuffle, drop_last=True)
    model = DDP(Spotter())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        data.set_epoch(epoch)
        total = torch.zeros(2)
        for wave, word in loader:
            logits = model(featurize(wave))
            loss = F.cross_entropy(logits, word)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
