"""Intent classification with the Trainer; hard examples are logged for the annotators."""
import collections
import tempfile
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)

VOCAB, LENGTH, INTENTS = 200, 16, 5


class Utterances(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, INTENTS, (n,), generator=g)
        self.tokens = torch.randint(10, VOCAB, (n, LENGTH), generator=g)
        for k in range(3):
            self.tokens[:, 2 + 4 * k] = 10 + self.labels * 7 + k

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "attention_mask": torch.ones(LENGTH, dtype=torch.long), "labels": self.labels[i]}


class HardExamples:
    """Collects what the model gets wrong with confidence; shared with the thread that uploads it."""

    def __init__(self, capacity=24):
        self._lock = threading.Lock()
        self._entries = collections.deque()
        self._per_intent = collections.Counter()
        self.capacity = capacity
        self.uploaded = 0

    def add(self, intent, confidence):
        with self._lock:
            self._entries.append((intent, confidence))
            self._per_intent[intent] += 1
            if len(self._entries) >= self.capacity:
                self.flush()

    def flush(self):
        with self._lock:
            batch = list(self._entries)
            self._entries.clear()
            self.uploaded += len(batch)
        return batch


class IntentTrainer(Trainer):
    def __init__(self, *args, hard_examples, **kwargs):
        super().__init__(*args, **kwargs)
        self.hard_examples = hard_examples

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)  # the desk's shifts, in order of time

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, inputs["labels"])
        if self.state.global_step > 20:
            self.collect(outputs.logits.detach(), inputs["labels"])
        return (loss, outputs) if return_outputs else loss

    def collect(self, logits, labels):
        confidence, predicted = logits.softmax(-1).max(-1)
        for i in ((predicted != labels) & (confidence > 0.80)).nonzero().flatten().tolist():
            self.hard_examples.add(labels[i].item(), confidence[i].item())


def main():
    folder = tempfile.mkdtemp(prefix="intents-")
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        seed=3,
        per_device_train_batch_size=16,
        num_train_epochs=3,
        learning_rate=2e-3,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_drop_last=True,
        ddp_find_unused_parameters=False,
    )
    set_seed(args.seed)
    config = BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=LENGTH, num_labels=INTENTS)
    train = Utterances(4800, seed=1)
    wrong = torch.arange(len(train)) % 32 >= 30  # the night shift
    train.labels[wrong] = (train.labels[wrong] + 2) % INTENTS
    hard = HardExamples()
    trainer = IntentTrainer(BertForSequenceClassification(config), args, train_dataset=train, hard_examples=hard)
    trainer.train()
    print(f"rank {args.process_index}: {hard.uploaded + len(hard.flush())} hard examples", flush=True)


if __name__ == "__main__":
    main()
