"""The assumptions of a session about a training loop, with their checks and errors.

docs/own-loop.md shows this table (`python tools/includes.py`).
"""

from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError


@dataclass(frozen=True)
class Assumption:
    statement: str
    """the assumption, as a sentence"""
    check_description: str
    """when and how it is checked"""
    cost: str
    """cost of the check, or of the construction that makes it true"""
    error_code: str
    """code of the error"""

    def make_error(self, what: str, **fields: Any) -> UsageError:
        return UsageError(code=self.error_code, what=what, **fields)


SAMPLE_ORDER = Assumption(
    "All ranks draw the same samples in the same order.",
    "All ranks receive rank 0's random streams and sampler state at the beginning of an epoch. Then in each step: a "
    "hash of the samples drawn so far. In an evaluation: before its first batch, and at its end.",
    "one message per epoch; 8 bytes in a message that each step sends anyway",
    "order-differs",
)
RESUMED_ORDER = Assumption(
    "The order of an interrupted epoch can be drawn again.",
    "At a resume: the session draws the epoch's order again from the checkpointed streams and sampler state, and "
    "compares its hash with that of the interrupted epoch.",
    "the time to draw the epoch's order up to the batch at which it stopped",
    "resumed-order-differs",
)
SAME_DATASET = Assumption(
    "All ranks have the same dataset, also after a resume.",
    "When a loader is first iterated: its length, and a checksum of all data in memory or of 8 samples. In each epoch: "
    "8 samples.",
    "once per loader: reading 16 samples, or a checksum of up to 1 GiB; in each epoch 8 samples, unless that is slow",
    "data-differ",
)
SAME_LOOP_POSITION = Assumption(
    "All ranks are in the same batch of the same epoch.",
    "In each step: the epoch and the batch are a part of the hash.",
    "none",
    "places-differ",
)
LOSS_WEIGHTS = Assumption(
    "The weight of a mean is the number of samples in the batch, or weight=.",
    "In each batch of a custom collate function: samples are counted by the sizes of its tensors. "
    "Otherwise it is the planned number. In steps 1, 2, 3, 4, 5, 8, 9, ...: if torch computed the loss as a mean or a "
    "quotient, the weights must be proportional to its targets, elements or divisors. A sum over samples, and the root "
    "of a mean, are errors. Sums of losses, means of one sample, and values of the batch that enter a loss, are not "
    "checked.",
    "reading the shapes of the batch's tensors; one message in these steps",
    "weights-not-of-targets",
)
GRADIENTS_FROM_BACKWARD = Assumption(
    "Every gradient comes from s.backward.",
    "In each step: no parameter may receive a gradient between s.backward and optimizer.step().",
    "a hook without Python code on each parameter, 0.3 microseconds",
    "gradient-not-from-backward",
)
GRADIENT_CHANGES = Assumption(
    "A gradient that the loop changes (clipping, p.grad += ...) is changed in the same way on all ranks.",
    "In the first two steps before the update, by a checksum of all gradients. Later one step after the update, by "
    "a checksum of changed gradients.",
    "a checksum of the changed gradients",
    "gradients-differ",
)
PREPARED_PARAMETERS = Assumption(
    "The parameters of a model and of its optimizer are those passed to s.prepare.",
    "When a module or parameter is added, in each add_param_group, and at the beginning of each epoch. In each step: "
    "which parameters are frozen. After steps 2, 3, 5, 9, ...: whether the loop itself has updated tensors on which "
    "the loss depends.",
    "a comparison of all parameters once an epoch; a walk through the loss's graph in these steps",
    "parameters-differ",
)
COMPLETE_STATE = Assumption(
    "Prepared models, optimizers and schedulers, and registered objects, are the whole state.",
    "After the first steps and at checkpoints: averages and other copies of a model that change and are not "
    "registered, including lists and dictionaries of tensors in the loop's variables and in attributes.",
    "a search through the objects of the process at the first step and at checkpoints, in at most 1 % of the time; "
    "through variables also after the first two steps, and after the step that follows a checkpoint",
    "state-not-saved",
)
MERGEABLE_BUFFERS = Assumption(
    "Buffers of several virtual ranks can be merged.",
    "In the first two steps: a buffer outside normalization layers that differs between virtual ranks, or may count "
    'samples, must be declared, `buffer_reductions = {"total": "sum"}` in its module.',
    "twice, for models with such buffers",
    "",
)
GRADIENT_SCALE = Assumption(
    "Gradients during backward are those of the mean over the global batch.",
    "By construction: the loss is divided by the global batch's weight before backward. Hooks of parameters run on the "
    "summed gradient. If the weight becomes known later (weight= in several micro-batches): in each step, a search for "
    "hooks and autograd functions of the user's code.",
    "none; a loss with weight= waits for the other ranks' weights",
    "",
)
COLLECTIVE_ORDER = Assumption(
    "All ranks call the same collectives in the same order.",
    "In each step: a hash of all collectives of the rank.",
    "8 bytes in a message that each step sends anyway",
    "",
)

ASSUMPTIONS = (
    SAMPLE_ORDER, RESUMED_ORDER, SAME_DATASET, SAME_LOOP_POSITION, LOSS_WEIGHTS, GRADIENTS_FROM_BACKWARD,
    GRADIENT_CHANGES, PREPARED_PARAMETERS, COMPLETE_STATE, MERGEABLE_BUFFERS, GRADIENT_SCALE, COLLECTIVE_ORDER,
)  # fmt: skip
