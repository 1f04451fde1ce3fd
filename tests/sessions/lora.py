"""LoRA with peft on a tiny model under each strategy: `lora.py bert`. Writes the differences from a plain loop."""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch.utils.data import TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import paceline

warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
torch.set_default_dtype(torch.float64)
SAMPLES, BATCH, WORDS, LENGTH = 35, 8, 50, 8  # the last batch has 3 samples
STRATEGIES = (
    "bucketed",
    "exact",
    "zero",
    "fsdp",
)  # fsdp last: its groups keep the port of a session that no agent started


def bert() -> Any:
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def base_of(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def with_adapter(make: Callable[[], Any]) -> Any:
    task = TaskType.SEQ_CLS if make is bert else TaskType.CAUSAL_LM
    torch.manual_seed(1)
    return get_peft_model(base_of(make), LoraConfig(task_type=task, r=4, lora_alpha=8, target_modules="all-linear"))


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


torch.manual_seed(2)
IDS, LABELS = torch.randint(0, WORDS, (SAMPLES, LENGTH)), torch.randint(0, 2, (SAMPLES,))


def loss_of(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    is_classifier = model.peft_type and model.active_peft_config.task_type == TaskType.SEQ_CLS
    return model(input_ids=ids, labels=labels if is_classifier else ids).loss


def plain(make: Callable[[], Any]) -> dict[str, torch.Tensor]:
    model = with_adapter(make)
    optimizer = adamw(model)
    for ids, labels in zip(IDS.split(BATCH), LABELS.split(BATCH), strict=True):
        optimizer.zero_grad()
        loss_of(model, ids, labels).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def trained(make: Callable[[], Any], strategy: Any, folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    """The weights, and the largest difference of the logits of the adapter that peft loads."""
    with paceline.session(strategy=strategy) as s:
        model = with_adapter(make)
        model, optimizer = s.prepare(model, adamw(model))
        for ids, labels in s.loader(TensorDataset(IDS, LABELS), global_batch=BATCH, shuffle=False):
            optimizer.zero_grad()
            s.backward(loss_of(model, ids, labels))
            optimizer.step()
        weights: dict[str, Any] = s.weights(model)
        s.main(lambda: model.save_pretrained(folder, state_dict=weights))
        with torch.no_grad():
            again: Any = with_adapter(make).eval()
            again.load_state_dict(weights)
            loaded: Any = PeftModel.from_pretrained(base_of(make), folder).eval()
            difference = (again(input_ids=IDS).logits - loaded(input_ids=IDS).logits).abs().max()
        return weights, float(difference)


def main() -> None:
    make = {"bert": bert, "gpt2": gpt2, "llama": llama}[sys.argv[1]]
    wanted, found = plain(make), dict[str, list[float]]()
    for strategy in STRATEGIES:
        weights, of_adapter = trained(make, strategy, Path(strategy))
        assert weights.keys() == wanted.keys()
        of_weights = max(float((weights[name] - wanted[name]).abs().max()) for name in wanted)
        found[strategy] = [of_weights, of_adapter]
    Path("lora.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
