"""A process group that behaves as NCCL's does, on the CPU: for what must hold under NCCL, on a machine without a GPU.

    register()                                    # in each rank; then dist.init_process_group("like_nccl", ...)

What it does as NCCL does:

- A call returns at once; the operation runs later, on a thread that stands for the stream, in the order of the calls,
  after a random delay. Until then the buffers to be written hold NaN (integers: their largest value).
- `work.wait()` does not block the host: it orders streams. What blocks is a *host read*: here, every function of torch
  that is called from Python with a tensor that an operation has still to write.
- An operation starts when all ranks have called it. Ranks that call different ones, in kind, type or shape, wait for
  ever, in silence.
- `abort()` lets the host go on: pending reads return, without an error, what happens to be there. That is the worst
  that can be: this rank's own, finite, unreduced values. Calls after it raise DistBackendError.
- One group's abort blocks as long as another group has work on its way, unless both are aborted between `_group_start`
  and `_group_end` (pytorch issue 119797).
- With TORCH_NCCL_ASYNC_ERROR_HANDLING other than 0, torch's watchdog ends the process by SIGABRT soon after an abort.
- `shutdown()` waits for what is on its way.
- It records into a flight recorder of its own, which is read by `_dump_nccl_trace`; `_dump_fr_trace` knows nothing of
  it. An entry is retired when its operation is over, not when it was called.
- Habits of gloo are refused: monitored_barrier, messages from anybody, bitwise reductions, tensors with gaps.

What it is honest for: what the host does around NCCL (order, lateness, aborts, the recorder, the guard). What it says
nothing about: kernels, streams of the device, speed, NCCL's own errors.
"""

from __future__ import annotations

import linecache
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

BACKEND = "like_nccl"
DELAY = "DOUBLE_NCCL_DELAY"  # seconds, the most that an operation is late by
HANGS = "DOUBLE_NCCL_HANGS"  # "3:bucket 0:17": on rank 3, the 17th operation on a tensor so called never starts
ENTRIES: list[Operation] = []
GROUPS: list[LikeNccl] = []
_pending: dict[int, Operation] = {}  # by the address of a storage that is still to be written
_grouping = threading.Event()  # between _group_start and _group_end


@dataclass
class Operation:
    """One collective, from its launch to its end."""

    group: LikeNccl
    kind: str
    number: int
    inputs: list[Tensor]  # as they were
    outputs: list[Tensor]  # the caller's
    run: Callable[[], object]  # over gloo, on copies
    copies: list[Tensor]
    signature: str
    label: str = ""  # the product's name of what it adds up
    message: int = 0
    created: int = field(default_factory=time.time_ns)
    over: threading.Event = field(default_factory=threading.Event)
    future: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)

    def finish(self, values: list[Tensor]) -> None:
        """Make `values` visible to the host in the buffers."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for output, value in zip(self.outputs, values, strict=True):
                output.copy_(value.reshape(output.shape))
        for output in self.outputs:
            if _pending.get(output.untyped_storage().data_ptr()) is self:
                del _pending[output.untyped_storage().data_ptr()]
        self.over.set()
        self.future.set_result(self.outputs)


class _Work(dist.Work):
    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation = operation

    def wait(self, timeout: object = None) -> bool:
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        name = caller.f_code.co_filename
        inside = f"{os.sep}torch{os.sep}" in name and not name.endswith("distributed_c10d.py")
        if inside or ".wait(" not in linecache.getline(name, caller.f_lineno):
            self._operation.over.wait()  # torch's own parts and C++ use the values where no function of torch shows it
        return True  # the stream waits, not the host

    def get_future(self) -> Any:  # DDP's: C++, which no Python function of torch shows
        return self._operation.future

    def is_completed(self) -> bool:
        return self._operation.over.is_set()


class LikeNccl(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        gloo = dist.PrefixStore("gloo", store)
        self._gloo = dist.ProcessGroup(gloo, rank, size)
        self._gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend = dist.ProcessGroupGloo(gloo, rank, size, timeout)
        self._gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        self._store, self._rank, self._size = store, rank, size
        self._count, self._aborted = 0, threading.Event()
        self._messages = 0
        self._labels: dict[str, int] = {}
        self._random = random.Random(f"{rank} {len(GROUPS)}")
        self._calls: queue.Queue[Operation] = queue.Queue()
        GROUPS.append(self)
        threading.Thread(target=self._stream, name="like-nccl", daemon=True).start()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _get_sequence_number_for_group(self) -> int:
        return self._count

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_backend(self, device: torch.device) -> LikeNccl:
        return self

    def _group_start(self) -> None:
        _grouping.set()

    def _group_end(self) -> None:
        _grouping.clear()
        for group in GROUPS:
            group._aborted.wait()

    def monitored_barrier(self, *_: object, **__: object) -> None:
        raise RuntimeError("monitored_barrier is only implemented for GLOO backend")

    def recv_anysource(self, *_: object, **__: object) -> None:
        raise RuntimeError("ProcessGroupNCCL does not support recv from any source")

    def abort(self) -> None:
        while not _grouping.is_set() and any(other.busy for other in GROUPS if other is not self):
            time.sleep(0.01)
        self._aborted.set()
        if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGABRT)).start()

    def shutdown(self) -> None:
        while self.busy and not self._aborted.is_set():
            time.sleep(0.01)
        self._aborted.set()
        GROUPS.remove(self)

    @property
    def busy(self) -> bool:
        return any(entry.group is self and not entry.over.is_set() for entry in [*ENTRIES])

    def launch(self, kind: str, inputs: list[Tensor], outputs: list[Tensor], run: Any, copies: list[Tensor]) -> _Work:
        """Enqueue an operation that writes `outputs`. `run` computes `copies`."""
        if self._aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}.")
        if any(not t.is_contiguous() for t in [*inputs, *outputs]):
            raise ValueError("Tensors must be contiguous")
        signature = f"{kind} {[(str(t.dtype), [*t.shape]) for t in inputs]}"
        if kind in ("send", "recv"):
            self._messages += 1
        else:
            self._count += 1
        before = [t.detach().clone() for t in inputs]
        label = str(inputs[0].__dict__.get("collective", "")) if inputs else ""
        made = Operation(self, kind, self._count, before, outputs, run, copies, signature, label, self._messages)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for output in outputs:
                output.fill_(float("nan") if output.is_floating_point() else torch.iinfo(_int(output.dtype)).max)
        for output in outputs:
            _pending[output.untyped_storage().data_ptr()] = made
        ENTRIES.append(made)
        self._calls.put(made)
        if _from_fsdp():
            made.over.wait()
        return _Work(made)

    def _stream(self) -> None:
        torch.set_num_threads(1)
        while True:
            operation = self._calls.get()
            time.sleep(self._random.uniform(0, float(os.environ.get(DELAY, "0.002"))))
            came = self._all_have_come(operation)
            try:
                if came:
                    operation.run()
            except RuntimeError:  # gloo's connections are cut: NCCL would not come back before it is aborted
                self._aborted.wait()
                came = False
            if came:
                operation.finish(operation.copies)
            else:
                own = [*operation.inputs, *operation.copies]
                operation.finish([own[i] if own[i].numel() == o.numel() else operation.copies[i] for i, o in
                                  enumerate(operation.outputs)])  # fmt: skip

    def _all_have_come(self, operation: Operation) -> bool:
        """Whether the operation may run. False after an abort."""
        self._labels[operation.label] = self._labels.get(operation.label, 0) + 1
        if f"{self._rank}:{operation.label}:{self._labels[operation.label]}" == os.environ.get(HANGS):
            self._aborted.wait()
        if operation.kind in ("send", "recv"):
            return not self._aborted.is_set()
        keys = [f"op/{operation.number}/{rank}" for rank in range(self._size)]
        try:
            self._store.set(keys[self._rank], operation.signature)
            while not self._aborted.is_set():
                if self._store.check(keys):
                    if len({self._store.get(key) for key in keys}) == 1:
                        return True
                    self._aborted.wait()
                time.sleep(0.0005)
        except RuntimeError:  # the store is gone, and with it the rank that held it: NCCL would not notice
            self._aborted.wait()
        return False


def _from_fsdp() -> bool:
    """Whether torch's fsdp calls. It orders its streams with operations that no function of torch exposes."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and f"{os.sep}torch{os.sep}distributed{os.sep}fsdp{os.sep}" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def _int(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype is torch.bool else dtype


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_copied(one) for one in value] if isinstance(value, list | tuple) else value


def _operation(kind: str, written: int | None, read: int | None) -> Callable[..., _Work]:
    """The method for a kind of operation. `written` and `read`: the positions of its buffers in the arguments."""

    def call(self: LikeNccl, *args: Any, **kwargs: Any) -> _Work:
        args = (*args, *kwargs.values())
        options = args[-1]
        op = getattr(options, "reduceOp", None)
        if any(op == bitwise for bitwise in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)):
            raise ValueError("Cannot use a bitwise ReduceOp with NCCL")
        copies = [_copied(one) for one in args]
        root = getattr(options, "rootRank", None)
        writes = written is not None and not (kind == "broadcast" and root == self._rank)
        writes = writes and not (kind in ("reduce", "gather") and root != self._rank)
        inputs = [] if read is None else [*_flat(args[read])]
        outputs = [*_flat(args[written])] if writes else []
        made = [*_flat(copies[written])] if writes else []
        run = getattr(self._gloo, kind)
        return self.launch(kind, inputs, outputs, lambda: run(*copies).wait(), made)

    return call


for _kind, _written, _read in [
    ("allreduce", 0, 0), ("allreduce_coalesced", 0, 0), ("broadcast", 0, 0), ("reduce", 0, 0), ("allgather", 0, 1),
    ("all_gather_single", 0, 1), ("_allgather_base", 0, 1), ("gather", 0, 1), ("scatter", 0, None),
    ("reduce_scatter", 0, None), ("reduce_scatter_single", 0, 1), ("_reduce_scatter_base", 0, 1), ("alltoall", 0, None),
    ("all_to_all_single", 0, None), ("alltoall_base", 0, None), ("barrier", None, None), ("send", None, 0),
    ("recv", 0, None),
]:  # fmt: skip
    setattr(LikeNccl, _kind, _operation(_kind, _written, _read))


class _HostReads(TorchFunctionMode):
    """Makes the host wait when it reads a value that the device is still computing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _pending and getattr(func, "__name__", "") not in ("data_ptr", "untyped_storage", "__get__"):
            for tensor in _flat([*args, *(kwargs or {}).values()]):
                with torch._C.DisableTorchFunction():
                    mine = getattr(tensor, "_local_tensor", tensor)  # a DTensor's is what has memory
                    operation = _pending.get(mine.untyped_storage().data_ptr())
                if operation is not None:
                    operation.over.wait()
        if func is Tensor.backward:  # within a call the mode is off, and hooks of backward read, too
            with self:
                given = dict(kwargs or {})
                return torch.autograd.backward(*args, grad_tensors=given.pop("gradient", None), **given)
        return func(*args, **(kwargs or {}))


def dump(collectives: bool = True, stacks: bool = True, only_active: bool = False) -> bytes:
    """The content of `_dump_nccl_trace`."""
    status: dict[str, dict[str, int]] = {}
    entries: list[dict[str, Any]] = []
    names = {id(group): name for group, name in dist.distributed_c10d._world.pg_names.items()}
    for number, one in enumerate([*ENTRIES]):
        mine = status.setdefault(str(id(one.group)), dict.fromkeys(_COUNTS, 0))
        mine["last_enqueued_collective"] = one.number
        if one.over.is_set():
            mine["last_started_collective"] = mine["last_completed_collective"] = one.number
        entries.append(_entry(one, number, names.get(id(one.group), "")))
    return pickle.dumps({"version": "2.10", "pg_status": status, **({"entries": entries} if collectives else {})})


_COUNTS = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
_NAMES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "_allgather_base": "_all_gather_base",
    "all_gather_single": "_all_gather_base", "reduce_scatter_single": "_reduce_scatter_base", "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
}  # fmt: skip
_TYPES = {torch.float32: "Float", torch.float64: "Double", torch.int64: "Long", torch.uint8: "Byte"}


def _entry(one: Operation, number: int, group: str) -> dict[str, Any]:
    over = one.over.is_set()
    return {
        "record_id": number, "pg_id": 0, "process_group": (group, "undefined"), "is_p2p": one.kind in ("send", "recv"),
        "collective_seq_id": one.number, "p2p_seq_id": one.message, "op_id": number + 1,
        "profiling_name": f"nccl:{_NAMES.get(one.kind, one.kind)}", "time_created_ns": one.created,
        "input_sizes": [[*t.shape] for t in one.inputs], "output_sizes": [[*t.shape] for t in one.outputs],
        "input_dtypes": [_TYPES.get(t.dtype, str(t.dtype)) for t in one.inputs],
        "output_dtypes": [_TYPES.get(t.dtype, str(t.dtype)) for t in one.outputs],
        "state": "completed" if over else "scheduled", "retired": over, "timeout_ms": 600_000,
    }  # fmt: skip


def register() -> None:
    """Register the backend with torch, and intercept host reads in this thread."""
    binding: Any = torch._C._distributed_c10d
    if binding.__dict__.get("_dump_nccl_trace") is dump:
        return
    binding._dump_nccl_trace = dump
    others: Any = binding._dump_fr_trace

    def without_gloo(*args: Any) -> bytes:
        found = pickle.loads(others(*args))
        inner = [one for one in found.get("entries", []) if not one["process_group"][0]]
        kept = [one for one in found.get("entries", []) if one not in inner]
        return pickle.dumps({**found, "entries": kept, "pg_status": {}})

    binding._dump_fr_trace = without_gloo
    dist.Backend.register_backend(BACKEND, LikeNccl, devices=["cpu"])
    _HostReads().__enter__()


def _as_torchs(owner: type) -> None:
    """Make stacks show these functions like torch's C++ functions, not as lines of the user."""
    for function in [*vars(owner).values()]:
        if isinstance(function, FunctionType):
            name = str(dist.distributed_c10d.__file__)
            function.__code__ = function.__code__.replace(co_filename=name)


for _owner in (_Work, LikeNccl, _HostReads):
    _as_torchs(_owner)
