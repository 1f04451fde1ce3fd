# Instruction tuning of a tiny GPT-2 with the Trainer: only the answer's tokens count in the loss.
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.set_num_threads(1)

MAX_LENGTH = 48
VOCAB = 128
SEP, PAD = 1, 0


class Chats(Dataset):
    """(prompt, answer) pairs of token ids; the answer repeats the prompt's beginning."""

    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.pairs = []
        for n in range(count):
            length = int(torch.randint(6, 20, (1,), generator=g))
            if n % 997 == 613:
                length = MAX_LENGTH + 10
            prompt = torch.randint(2, VOCAB, (length,), generator=g).tolist()
            self.pairs.append((prompt, prompt[:10]))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, n):
        prompt, answer = self.pairs[n]
        ids = (prompt + [SEP] + answer)[:MAX_LENGTH]
        labels = ([-100] * (len(prompt) + 1) + answer)[:MAX_LENGTH]
        return {"input_ids": ids, "labels": labels}


def collate(rows):
    width = max(len(row["input_ids"]) for row in rows)

    def fill(name, value):
        return torch.tensor([row[name] + [value] * (width - len(row[name])) for row in rows])

    ids = fill("input_ids", PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": fill("labels", -100)}


class AnswerTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        answer = targets != -100
        losses = torch.nn.functional.cross_entropy(logits, targets.clamp(min=0), reduction="none")
        loss = (losses * answer).sum() / answer.sum()
        return (loss, outputs) if return_outputs else loss


def main():
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=MAX_LENGTH, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=SEP, eos_token_id=SEP, pad_token_id=PAD,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="sft-"),
        per_device_train_batch_size=1,
        max_steps=700,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        seed=4,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    torch.manual_seed(1)
    trainer = AnswerTrainer(
        model=GPT2LMHeadModel(config), args=args, train_dataset=Chats(1500, 5), data_collator=collate
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        print("training loss", round(result.training_loss, 4))


if __name__ == "__main__":
    main()
