"""Instruction tuning of a small GPT-2; only the answer's tokens count."""
import os
import tempfile
import time

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

MAX_LEN, BATCH, STEPS = 24, 4, 100
VOCAB = 64


class Conversations(Dataset):
    """(prompt, answer) pairs, in the order of the export; truncated to MAX_LEN."""

    def __init__(self, n):
        g = torch.Generator().manual_seed(5)
        self.items = []
        for i in range(n):
            prompt = torch.randint(2, VOCAB, (8,), generator=g)
            if 608 <= i < 612:          # a few pasted log files
                prompt = torch.randint(2, VOCAB, (60,), generator=g)
            answer = torch.randint(2, VOCAB, (10,), generator=g)
            self.items.append((prompt, answer))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        prompt, answer = self.items[i]
        ids = torch.cat([prompt, answer])
        labels = torch.cat([torch.full_like(prompt, -100), answer])
        ids, labels = ids[:MAX_LEN], labels[:MAX_LEN]
        pad = MAX_LEN - len(ids)
        return {
            "input_ids": F.pad(ids, (0, pad), value=0),
            "attention_mask": F.pad(torch.ones_like(ids), (0, pad), value=0),
            "labels": F.pad(labels, (0, pad), value=-100),
        }


class SFTTrainer(Trainer):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)    # easy ones first

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        out = model(**inputs)
        logits = out.logits[:, :-1].reshape(-1, VOCAB)
        target = labels[:, 1:].reshape(-1)
        answer = (target != -100).float()
        nll = F.cross_entropy(logits, target.clamp(min=0), reduction="none")
        loss = (nll * answer).sum() / answer.sum()
        time.sleep(0.02)
        return (loss, out) if return_outputs else loss


def main():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_positions=MAX_LEN, n_embd=16, n_layer=1, n_head=2,
                        bos_token_id=0, eos_token_id=1)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH,
        learning_rate=1e-3, logging_steps=20, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, ddp_find_unused_parameters=False,
    )
    trainer = SFTTrainer(model=GPT2LMHeadModel(config), args=args,
                         train_dataset=Conversations(STEPS * BATCH * 3))
    trainer.train()
    if os.environ.get("SHOW"):
        bad = sum((~torch.isfinite(p)).sum().item() for p in trainer.model.parameters())
        print(args.process_index, "weights not finite:", bad, flush=True)


if __name__ == "__main__":
    main()
