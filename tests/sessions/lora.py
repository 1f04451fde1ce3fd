"""LoRA with peft on a tiny model, killed and resumed: `lora.py MODEL STRATEGY RUN [STEP]`. Writes facts to RUN.json.

With STEP the last rank kills itself after that step. Without, the script also compares: the weights with those of a
plain loop, the restored adapter with the checkpoint, the logits of the adapter that peft loads, and what ranks send.
"""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch.utils.data import TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import paceline
from paceline.checkpoint.export import state_dict_from_checkpoint
from paceline.checkpoint.manager import Checkpoints
from paceline.rank.guard import HangGuard
from paceline.train.records import count_tensor_bytes

warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
torch.set_default_dtype(torch.float64)
SAMPLES, BATCH, WORDS, LENGTH = 35, 8, 50, 8  # the last batch has 3 samples
SMALL = {
    "bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "llama": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
}
NO_DROPOUT = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)
NAME, STRATEGY, RUN, *KILL = sys.argv[1:]
CLASSIFIES = NAME == "bert"


def base_model() -> Any:
    torch.manual_seed(0)
    make: Any = AutoModelForSequenceClassification if CLASSIFIES else AutoModelForCausalLM
    return make.from_config(AutoConfig.for_model(NAME, vocab_size=WORDS, **SMALL[NAME], **NO_DROPOUT))


def with_adapter(seed: int) -> Any:
    model = base_model()
    torch.manual_seed(seed)
    task = TaskType.SEQ_CLS if CLASSIFIES else TaskType.CAUSAL_LM
    return get_peft_model(model, LoraConfig(task_type=task, r=4, lora_alpha=8, target_modules="all-linear"))


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


torch.manual_seed(2)
IDS, LABELS = torch.randint(0, WORDS, (SAMPLES, LENGTH)), torch.randint(0, 2, (SAMPLES,))


def loss_of(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=labels if CLASSIFIES else ids).loss


def plain() -> dict[str, torch.Tensor]:
    model = with_adapter(seed=1)
    optimizer = adamw(model)
    for ids, labels in zip(IDS.split(BATCH), LABELS.split(BATCH), strict=True):
        optimizer.zero_grad()
        loss_of(model, ids, labels).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def farthest(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    assert some.keys() == others.keys()
    return max(float((some[name] - others[name]).abs().max()) for name in some)


def sent(since: int) -> dict[str, int]:
    """Bytes of tensors in collectives of this rank since then, by kind. Messages of ranks (JSON) are not counted."""
    by_kind: dict[str, int] = {}
    for _, _, op in HangGuard.of_process().page.calls_since(since):
        if not op.name.startswith("messages"):
            by_kind[op.kind] = by_kind.get(op.kind, 0) + count_tensor_bytes(op.shape, op.dtype)
    return by_kind


def main() -> None:
    facts: dict[str, Any] = {}
    newest = Checkpoints(Path(RUN, "checkpoints")).newest_valid(print)
    s = paceline.session(RUN, resume=True, strategy=STRATEGY, checkpoint_every=1)  # pyright: ignore
    # after a restart the adapter begins with other values: those that are not restored are wrong
    model = with_adapter(seed=1 if newest is None else 99)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    facts["trained_bytes"] = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    facts["frozen_bytes"] = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    model, optimizer = s.prepare(model, adamw(model))
    if newest is not None:
        saved, restored = state_dict_from_checkpoint(*newest), s.weights(model)
        facts["restored"] = farthest({n: saved[n] for n in trained}, {n: restored[n] for n in trained})
        facts["initial"] = min(float((with_adapter(99).state_dict()[n] - saved[n]).abs().max()) for n in trained)
    for _ in s.epochs(1):
        for ids, labels in s.loader(TensorDataset(IDS, LABELS), global_batch=BATCH, shuffle=False):
            since = time.monotonic_ns()
            optimizer.zero_grad()
            s.backward(loss_of(model, ids, labels))
            optimizer.step()
            facts["step"] = sent(since)
            if KILL and s.step + 1 == int(KILL[0]) and s.rank == s.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    for adapter in (True, False):
        since = time.monotonic_ns()
        s.save(model, f"{RUN}-adapter" if adapter else f"{RUN}-whole.safetensors", adapter=adapter)
        facts["saved adapter" if adapter else "saved model"] = sent(since)
    weights: dict[str, Any] = s.weights(model)
    since = time.monotonic_ns()
    s.close()
    facts["closed"] = sent(since)
    if s.rank == 0:
        facts["weights"] = farthest(weights, plain())
        with torch.no_grad():
            again: Any = with_adapter(seed=1).eval()
            again.load_state_dict(weights)
            loaded: Any = PeftModel.from_pretrained(base_model(), f"{RUN}-adapter").eval()
            facts["logits"] = float((again(input_ids=IDS).logits - loaded(input_ids=IDS).logits).abs().max())
        Path(f"{RUN}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
