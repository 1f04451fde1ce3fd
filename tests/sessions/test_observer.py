"""An observer of a session is told each event, in order, and changes only what it may."""

import json
from pathlib import Path

from tests import warm

LOOP = """
import json, torch, paceline
from paceline.sessions.observer import Observer, use_observer

class Told(Observer):
    options, max_steps, said = {"virtual_ranks": 2}, 3, []
    def __getattribute__(self, name):
        if name.startswith("on_"):
            self.said.append(name)
        return super().__getattribute__(name)
    def on_batch(self, inputs, work):
        return inputs if work is None else 2 * inputs
    def on_loader(self, loader, *, per_virtual_rank):
        loader.short_epoch = lambda plan: (1, 3)

with use_observer(Told()), paceline.session("run", checkpoint_every=1) as s:
    model, optimizer = s.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    train, batches = s.loader(torch.ones(40, 2), global_batch=4), []
    for epoch in s.epochs(9):
        for x in train:
            optimizer.zero_grad()
            s.backward(model(x).mean())
            optimizer.step()
            batches.append((epoch, s.batch, x.tolist()))
    s.log(count=len(batches))
    s.save(model, "weights.pt")
print(json.dumps([type(s).__name__, s.step, len(train), batches, Told.said]))
"""


def test_events_in_order_epochs_cut_and_steps_limited_and_no_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    done = warm.run((tmp_path / "loop.py",), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    kind, steps, length, batches, said = json.loads(done.stdout.splitlines()[-1])
    assert (kind, steps, length) == ("Session", 3, 2)
    # two virtual ranks: 2 and 2 samples, then 2 and 1
    assert [(epoch, batch, len(x)) for epoch, batch, x in batches] == [
        (0, 0, 2), (0, 0, 2), (0, 1, 2), (0, 1, 1), (1, 0, 2), (1, 0, 2)]  # fmt: skip
    assert all(value == 2 for _, _, x in batches for row in x for value in row)
    body = ["on_batch", "on_backward", "on_gradients"]
    step = [*body, "on_batch_end", *body, "on_update", "on_batch_end", "on_step"]
    told = [name for name in said if name != "on_print"]
    assert told == ["on_loader", *step * 3, "on_numbers", "on_end"]
    assert [path.name for path in tmp_path.iterdir()] == ["loop.py"]
