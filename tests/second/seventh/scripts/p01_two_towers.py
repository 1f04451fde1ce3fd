"""Two-tower retrieval with Accelerate: queries and documents go through their own tower, in-batch negatives."""
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Clicks(Dataset):
    def __init__(self, count=9600, width=40):
        g = torch.Generator().manual_seed(8)
        self.queries = torch.randn(count, width, generator=g)
        mix = torch.randn(width, width, generator=g) / width**0.5
        self.documents = self.queries @ mix + 0.3 * torch.randn(count, width, generator=g)

    def __len__(self):
        return len(self.queries)

    def __getitem__(self, i):
        return {"query": self.queries[i], "document": self.documents[i]}


class Towers(nn.Module):
    def __init__(self, width=40, hidden=192, out=64):
        super().__init__()

        def tower():
            return nn.Sequential(
                nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, out)
            )

        self.query_tower, self.document_tower = tower(), tower()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def encode_query(self, x):
        return F.normalize(self.query_tower(x), dim=-1)

    def encode_document(self, x):
        return F.normalize(self.document_tower(x), dim=-1)

    def forward(self, query, document):
        return self.scale.exp() * self.encode_query(query) @ self.encode_document(document).T


class Retriever:
    """What the recipes share: how scores are made, and the loss over them."""

    def __init__(self, accelerator, model):
        self.towers = accelerator.unwrap_model(model)
        self.memory = None

    def scores(self, batch):
        q = self.towers.encode_query(batch["query"])
        d = self.towers.encode_document(batch["document"])
        if self.memory is not None:
            d = torch.cat([d, self.memory])
        self.memory = d[: len(q)].detach()
        return self.towers.scale.exp() * q @ d.T

    def loss(self, batch):
        scores = self.scores(batch)
        return F.cross_entropy(scores, torch.arange(len(scores)))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(21)
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Clicks(), batch_size=32, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    retriever = Retriever(accelerator, model)
    model.train()
    for epoch in range(6):
        for step, batch in enumerate(loader):
            loss = retriever.loss(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
