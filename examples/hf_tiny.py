"""Train a tiny BERT classifier with random weights: no download, and a few seconds on a CPU.

pip install '.[hf]'
paceline launch --nproc 2 -- examples/hf_tiny.py
"""

from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

import paceline


def main() -> None:
    s = paceline.session(strategy="exact", virtual_ranks=2, seed=1)
    config = BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=8,
    )
    model: Any = BertForSequenceClassification(config)  # .from_pretrained(NAME) loads trained weights instead
    texts = torch.randint(20, (512, 8), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": text, "labels": (text == 7).any().long()} for text in texts]  # is there a 7 in the text?

    loader: Any = s.loader(rows, global_batch=32)
    model, optimizer = s.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    for epoch in s.epochs(4):
        model.train()
        total, count = 0.0, 0
        for batch in loader:
            loss = model(**batch).loss
            s.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total, count = total + loss.item() * s.samples, count + s.samples
        s.print(f"epoch {epoch + 1} loss {s.mean(total, count):.6f}")
    s.close()


if __name__ == "__main__":
    main()
