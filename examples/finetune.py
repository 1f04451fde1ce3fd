"""Fine-tune a Hugging Face classifier: all weights, or a LoRA adapter with peft.

pip install '.[hf]'
paceline launch --nproc 2 -- examples/finetune.py --model FOLDER --data train.jsonl
paceline launch --nproc 2 -- examples/finetune.py --model FOLDER --data train.jsonl --lora

FOLDER may also be a name on the Hub. A line of the data: {"text": "...", "label": 0}
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

import paceline


def with_lora(model: Any) -> Any:
    """The model with an adapter in each linear layer. Everything else but the head is frozen."""
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, target_modules="all-linear")
    return get_peft_model(model, config)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(args: argparse.Namespace) -> None:
    settings: Any = {"strategy": args.strategy, "precision": args.precision, "virtual_ranks": 2, "seed": 1}
    s = paceline.session(args.run_dir, resume=args.run_dir is not None, **settings)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model: Any = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    if args.lora:
        model = with_lora(model)  # before the optimizer and s.prepare

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        texts = [row["text"] for row in rows]
        batch = tokenizer(texts, padding="max_length", truncation=True, max_length=32, return_tensors="pt")
        return {**batch, "labels": torch.tensor([row["label"] for row in rows])}

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr)
    loader: Any = s.loader(rows_of(args.data), global_batch=16, collate=collate)
    steps = args.epochs * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, scheduler = s.prepare(model, optimizer, scheduler)
    for _ in s.epochs(args.epochs):
        model.train()
        total, count = 0.0, 0
        for batch in loader:
            loss = model(**batch).loss
            s.backward(loss)
            s.clip_grad_norm(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total, count = total + loss.item() * s.samples, count + s.samples
        if s.any(count > 0):  # not if a resume begins at the end of an epoch
            s.print(f"loss {s.mean(total, count):.6f}")
    save(s, model, tokenizer, args.out, adapter=args.lora)
    s.close()


def save(s: paceline.Session, model: nn.Module, tokenizer: Any, folder: str, *, adapter: bool) -> None:
    """As transformers and peft read it: `from_pretrained(folder)`. For LoRA the adapter alone."""
    if adapter:
        s.save(model, folder, adapter=True)
    else:
        s.main(lambda weights: model.save_pretrained(folder, state_dict=weights), s.weights(model))  # pyright: ignore
    s.main(lambda: tokenizer.save_pretrained(folder))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--precision")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--strategy", default="bucketed")
    parser.add_argument("--run-dir")
    parser.add_argument("--out", default="fine-tuned")
    train(parser.parse_args(words))


if __name__ == "__main__":
    main()
