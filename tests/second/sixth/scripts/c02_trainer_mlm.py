"""Masked-language modelling of synthetic protein-like strings with the Trainer. Masks come from a generator of each rank's own."""
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import RobertaConfig, RobertaForMaskedLM, Trainer, TrainerCallback, TrainingArguments

torch.set_num_threads(1)
OUT = "/tmp/fourth_mlm"
RANK = int(os.environ.get("RANK", 0))
MASK, PAD = 2, 1


class Proteins(Dataset):
    """Strings in which a residue is often that of three places before."""

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.strings = []
        for _ in range(count):
            string = list(rng.integers(3, 23, 3))
            while len(string) < 18:
                string.append(string[-3] if rng.random() < 0.9 else int(rng.integers(3, 23)))
            self.strings.append(torch.tensor([int(s) for s in string]))

    def __len__(self):
        return len(self.strings)

    def __getitem__(self, i):
        return {"input_ids": self.strings[i]}


class Masker:
    """Hides exactly three residues of each string, so that each sample counts the same."""

    def __init__(self, seed, fixed=False):
        self.seed, self.fixed = seed, fixed
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, samples):
        tokens = torch.stack([s["input_ids"] for s in samples])
        if self.fixed:
            chosen = torch.zeros(tokens.shape, dtype=torch.bool)
            chosen[:, 4::5] = True
        else:
            chosen = torch.rand(tokens.shape, generator=self.generator).argsort(1) < 3
        return {
            "input_ids": tokens.masked_fill(chosen, MASK),
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens.masked_fill(~chosen, -100),
        }


class MaskingTrainer(Trainer):
    """Evaluates with masks that are always the same."""

    def get_eval_dataloader(self, eval_dataset=None):
        kept, self.data_collator = self.data_collator, Masker(0, fixed=True)
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = kept


class Notes(TrainerCallback):
    """Each rank keeps notes of its own."""

    def on_epoch_end(self, args, state, control, **kwargs):
        with open(os.path.join(OUT, f"rank{RANK}.txt"), "a") as file:
            file.write(f"{state.epoch:.2f} {state.global_step}\n")


def accuracy(prediction):
    guessed, labels = prediction.predictions, prediction.label_ids
    counted = labels != -100
    return {"accuracy": float((guessed == labels)[counted].sum() / counted.sum())}


def masked_loss(outputs, labels, num_items_in_batch=None):
    """The mean over what is hidden in the whole step, on all ranks."""
    total = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / (num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum())


def main():
    os.makedirs(OUT, exist_ok=True)
    config = RobertaConfig(
        vocab_size=24, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=24, pad_token_id=PAD, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    args = TrainingArguments(
        output_dir=OUT,
        num_train_epochs=4,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=25,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=20,
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        label_names=["labels"],
        seed=6,
    )
    trainer = MaskingTrainer(
        model=RobertaForMaskedLM(config),
        args=args,
        data_collator=Masker(900 + RANK),
        train_dataset=Proteins(1536, 1),
        eval_dataset=Proteins(100, 2),
        compute_loss_func=masked_loss,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        callbacks=[Notes()],
    )
    trainer.train()
    trainer.save_model(os.path.join(OUT, "final"))


if __name__ == "__main__":
    main()
