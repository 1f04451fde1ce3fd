"""Tiny GPT-2 from scratch with Hugging Face's Trainer."""
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Counting(Dataset):
    def __init__(self, n=400, length=16, vocab=64):
        g = torch.Generator().manual_seed(0)
        start = torch.randint(0, vocab, (n, 1), generator=g)
        stride = torch.randint(1, 4, (n, 1), generator=g)
        self.ids = (start + stride * torch.arange(length)) % vocab

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class KeepEmbeddingsSmall(TrainerCallback):
    """Looks at the embeddings now and then and pulls those back that have grown too long."""

    def __init__(self, every=22, limit=0.1):
        self.every, self.limit = every, limit

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0 and state.is_world_process_zero:
            table = model.get_input_embeddings().weight
            with torch.no_grad():
                norms = table.norm(dim=1, keepdim=True)
                table.mul_((self.limit / norms).clamp(max=1.0))
            print(f"step {state.global_step}: longest embedding was {norms.max():.3f}")


def main():
    set_seed(17)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out, per_device_train_batch_size=4, max_steps=50, learning_rate=2e-3, logging_steps=10,
            save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, ddp_backend="gloo",
        )
        Trainer(model=model, args=args, train_dataset=Counting(), callbacks=[KeepEmbeddingsSmall()]).train()


if __name__ == "__main__":
    main()
