"""LoRA with peft on a tiny model under each strategy: `lora.py bert`. Writes the differences from a plain loop."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch.utils.data import TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import paceline

warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
torch.set_default_dtype(torch.float64)
SAMPLES, BATCH, WORDS, LENGTH = 35, 8, 50, 8  # the last batch has 3 samples
STRATEGIES = ("bucketed", "exact", "zero", "fsdp")
SMALL = {
    "bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "llama": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
}
NO_DROPOUT = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)
NAME = sys.argv[1]
CLASSIFIES = NAME == "bert"


def base_model() -> Any:
    torch.manual_seed(0)
    make: Any = AutoModelForSequenceClassification if CLASSIFIES else AutoModelForCausalLM
    return make.from_config(AutoConfig.for_model(NAME, vocab_size=WORDS, **SMALL[NAME], **NO_DROPOUT))


def with_adapter() -> Any:
    model = base_model()
    torch.manual_seed(1)
    task = TaskType.SEQ_CLS if CLASSIFIES else TaskType.CAUSAL_LM
    return get_peft_model(model, LoraConfig(task_type=task, r=4, lora_alpha=8, target_modules="all-linear"))


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


torch.manual_seed(2)
IDS, LABELS = torch.randint(0, WORDS, (SAMPLES, LENGTH)), torch.randint(0, 2, (SAMPLES,))


def loss_of(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=labels if CLASSIFIES else ids).loss


def plain() -> dict[str, torch.Tensor]:
    model = with_adapter()
    optimizer = adamw(model)
    for ids, labels in zip(IDS.split(BATCH), LABELS.split(BATCH), strict=True):
        optimizer.zero_grad()
        loss_of(model, ids, labels).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def trained(strategy: Any) -> tuple[dict[str, torch.Tensor], float]:
    """The weights, and the largest difference of the logits of the adapter that peft loads."""
    with paceline.session(strategy=strategy) as s:
        model = with_adapter()
        model, optimizer = s.prepare(model, adamw(model))
        for ids, labels in s.loader(TensorDataset(IDS, LABELS), global_batch=BATCH, shuffle=False):
            optimizer.zero_grad()
            s.backward(loss_of(model, ids, labels))
            optimizer.step()
        weights: dict[str, Any] = s.weights(model)
        s.main(lambda: model.save_pretrained(strategy, state_dict=weights))
        with torch.no_grad():
            again: Any = with_adapter().eval()
            again.load_state_dict(weights)
            loaded: Any = PeftModel.from_pretrained(base_model(), strategy).eval()
            difference = (again(input_ids=IDS).logits - loaded(input_ids=IDS).logits).abs().max()
        return weights, float(difference)


def main() -> None:
    wanted, found = plain(), dict[str, list[float]]()
    for strategy in STRATEGIES:
        weights, of_adapter = trained(strategy)
        assert weights.keys() == wanted.keys()
        of_weights = max(float((weights[name] - wanted[name]).abs().max()) for name in wanted)
        found[strategy] = [of_weights, of_adapter]
    Path("lora.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
