import tempfile

import torch
import torch.nn as nn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed


class MeanPoolClassifier(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(config.hidden_size, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.bert(input_ids=input_ids).last_hidden_state
        mask = attention_mask.unsqueeze(-1).float()
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        logits = self.head(pooled)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def reviews(n=480, length=12):
    g = torch.Generator().manual_seed(4)
    data = []
    for i in range(n):
        size = int(torch.randint(3, length + 1, (1,), generator=g))
        if i == 339:
            size = 0  # left empty by its author
        ids = torch.zeros(length, dtype=torch.long)
        ids[:size] = torch.randint(1, 100, (size,), generator=g)
        mask = (torch.arange(length) < size).long()
        data.append({"input_ids": ids, "attention_mask": mask, "labels": int(ids[:size].sum() > 50 * size)})
    return data


set_seed(5)
config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
with tempfile.TemporaryDirectory() as out:
    trainer = Trainer(
        model=MeanPoolClassifier(config),
        args=TrainingArguments(output_dir=out, per_device_train_batch_size=4, num_train_epochs=1, logging_strategy="no",
                               save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=5),
        train_dataset=reviews(),
    )
    trainer.train()
