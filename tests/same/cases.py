# ruff: noqa: E501 - a script is one line here
"""Small scripts of any kind, each to be run under torchrun and under `paceline launch`.

What a script says with `mark` is compared, and the files `saved-*` that it leaves; `READY` tells that signals may come.
"""

import signal
from dataclasses import dataclass

PRELUDE = """import os, sys
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def mark(*words): os.write(1, (" ".join(map(str, ("MARK", rank, *words))) + chr(10)).encode())  # whole
def ready(): os.write(1, f"READY {rank}{chr(10)}".encode())
mark("begins")
"""
GROUP = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
MODEL = (
    f"{GROUP}from torch import nn\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
    "torch.manual_seed(0)\nmodel = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"
    "data = torch.randn(16, 4, generator=torch.Generator().manual_seed(rank))\n"
    "def digest(one): return round(sum(float(p.detach().abs().sum()) for p in one.parameters()), 5)\n"
)
TRAIN = (
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for batch in data.split(4):\n    optimizer.zero_grad()\n    model(batch).square().mean().backward()\n"
    "    optimizer.step()\nmark(digest(model))\n"
)
DOWN = "dist.destroy_process_group()\n"
WAIT = "import time\nready()\nwhile True: time.sleep(0.05)\n"


@dataclass(frozen=True)
class Case:
    name: str
    code: str
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    given: str = ""
    signals: tuple[signal.Signals, ...] = ()
    module: bool = False
    bare: bool = False  # without the prelude
    needs: str = ""  # a package


def _noting(*names: str) -> str:
    return (
        "import signal, sys\n"
        f"def note(number, frame): mark('heard', signal.Signals(number).name); sys.exit({{}})\n"
        f"for name in {names!r}: signal.signal(getattr(signal, name), note)\n{WAIT}"
    ).replace("sys.exit({})", "sys.exit(0)")


PYTHON = (
    Case("argv", "mark(sys.argv)", ("--epochs", "3", "-x", "", "a b")),
    Case("argparse", "import argparse\np = argparse.ArgumentParser()\np.add_argument('--count', type=int)\nmark(p.parse_args().count)", ("--count", "4")),
    Case("argparse-wrong", "import argparse\np = argparse.ArgumentParser()\np.add_argument('--count', type=int)\nmark(p.parse_args().count)", ("--count", "x")),
    Case("names", "mark(__name__, __file__.rpartition('/')[2], __doc__, __spec__, __package__)"),
    Case("module", "mark(__name__, __spec__.name, sys.argv[0].rpartition('/')[2], sys.argv[1:])", ("1",), module=True),
    Case("path", "mark(sys.path[0] == os.path.dirname(os.path.abspath(__file__)), os.getcwd() == sys.path[0])"),
    Case("relative", "open('saved-' + str(rank), 'w').write('x' * rank)"),
    Case("pickle", "import pickle\nclass A: pass\nmark(type(pickle.loads(pickle.dumps(A()))) is A)"),
    Case("spawn", "import multiprocessing as mp\ndef f(q): q.put(os.getpid() != 1)\nif __name__ == '__main__':\n    c = mp.get_context('spawn'); q = c.Queue(); p = c.Process(target=f, args=(q,)); p.start(); mark(q.get()); p.join(); mark(p.exitcode)"),
    Case("fork", "import multiprocessing as mp\ndef f(q): q.put(rank)\nc = mp.get_context('fork'); q = c.Queue(); p = c.Process(target=f, args=(q,)); p.start(); mark(q.get()); p.join(); mark(p.exitcode)"),
    Case("pool", "from concurrent.futures import ProcessPoolExecutor as P\ndef f(x): return x * x\nif __name__ == '__main__':\n    with P(2) as p: mark(list(p.map(f, range(4))))"),
    Case("threads", "import threading\nt = threading.Thread(target=lambda: mark('in a thread')); t.start(); t.join()"),
    Case("thread-outlives-main", "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.5), mark('last'))).start()"),
    Case("daemon-thread", "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start(); mark('end')"),
    Case("asyncio", "import asyncio\nasync def f(): await asyncio.sleep(0.01); return 3\nmark(asyncio.run(f()))"),
    Case("asyncio-subprocess", "import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('echo', 'x', stdout=-1); return (await p.communicate())[0]\nmark(asyncio.run(f()))"),
    Case("atexit", "import atexit\natexit.register(mark, 'first'); atexit.register(mark, 'second')"),
    Case("atexit-after-error", "import atexit\natexit.register(mark, 'exit')\nraise ValueError('no')"),
    Case("finally", "try: 1 / 0\nfinally: mark('finally')"),
    Case("exit-0", "sys.exit()"),
    Case("exit-3", "import time\ntime.sleep(0.3 * rank)\nsys.exit(3)"),
    Case("exit-on-one-rank", "import time\nif rank: time.sleep(0.5)\nelse: sys.exit(7)\ntime.sleep(60)"),
    Case("exit-words", "sys.exit('words')"),
    Case("exit-256", "sys.exit(256)"),
    Case("os-exit", "mark('before'); os._exit(5)"),
    Case("killed-by-itself", "import signal\nos.kill(os.getpid(), signal.SIGKILL)"),
    Case("abort", "os.abort()"),
    Case("syntax", "this is no python"),
    Case("import-error", "import there_is_no_such_module"),
    Case("excepthook", "sys.excepthook = lambda *a: mark('hook', a[0].__name__)\nraise ValueError"),
    Case("keyboard-interrupt-raised", "raise KeyboardInterrupt"),
    Case("warnings", "import warnings\nwarnings.showwarning = lambda m, c, f, n, *a: mark(c.__name__, os.path.basename(f), n)\nwarnings.simplefilter('always')\ndef f(): warnings.warn('x', DeprecationWarning, stacklevel=2)\nf()"),
    Case("warning-filter", "import warnings\nwarnings.simplefilter('error')\ntry: warnings.warn('x')\nexcept UserWarning as e: mark(e)"),
    Case("logging", "import logging\nlogging.basicConfig(stream=sys.stdout, format='MARK %(name)s %(lineno)d %(message)s')\nlogging.warning('x')"),
    Case("traceback-lines", "import traceback\ndef f(): 1 / 0\ntry: f()\nexcept ZeroDivisionError as e: mark([(os.path.basename(x.filename), x.lineno) for x in traceback.extract_tb(e.__traceback__)])"),
    Case("inspect", "import inspect\ndef f(): pass\nmark(inspect.getsource(f))"),
    Case("dataclass", "from dataclasses import dataclass\n@dataclass\nclass A: x: int = 1\nmark(A(2))"),
    Case("recursion", "def f(n): return n and 1 + f(n - 1)\nmark(f(900), sys.getrecursionlimit())"),
    Case("locale", "import locale\nmark(sys.stdout.encoding, sys.getfilesystemencoding(), 'äöü€')"),
    Case("long-line", "mark('x' * 5000)"),
    Case("no-newline", "sys.stdout.write(f'MARK {rank} end')"),
    Case("stderr", "print(f'MARK {rank} words', file=sys.stderr)"),
    Case("print-much", "for i in range(200): print(f'MARK {rank} {i}\\n', end='')"),
    Case("subprocess-output", "import subprocess\nsubprocess.run(['echo', 'MARK', str(rank), 'child'])"),
    Case("system", "mark(os.system('exit 3'))"),
    Case("tempfile", "import tempfile\nwith tempfile.TemporaryDirectory() as d: mark(os.path.isdir(d))\nmark(os.path.isdir(d))"),
    Case("future", "from __future__ import annotations\ndef f(x: nothing): pass\nprint(f'MARK {f.__annotations__}\\n', end='', flush=True)", bare=True),
    Case("main-guard", "if __name__ == '__main__': mark('main')\nelse: mark('not main')"),
    Case("import-main", "import __main__\nmark(__main__ is sys.modules[__name__])"),
)  # fmt: skip
ENVIRONMENT = (
    Case("ranks", "mark([os.environ[n] for n in ('WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE')])"),
    Case("roles", "mark([os.environ[n] for n in ('ROLE_RANK', 'ROLE_NAME', 'ROLE_WORLD_SIZE')])", options=("--role=x",)),
    Case("elastic", "mark([os.environ['TORCHELASTIC_' + n] for n in ('RESTART_COUNT', 'MAX_RESTARTS', 'RUN_ID')])", options=("--rdzv-id=job", "--max-restarts=3")),
    Case("elastic-launched", "import torch.distributed as dist\nmark(dist.is_torchelastic_launched())"),
    Case("record", "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main(): raise ValueError('told')\ntry: main()\nexcept ValueError: mark('told' in open(os.environ['TORCHELASTIC_ERROR_FILE']).read())"),
    Case("env-store", "import torch.distributed as dist\nstore, r, w = next(dist.rendezvous('env://'))\nstore.set(str(r), 'x'); store.wait([str(i) for i in range(w)]); mark(w)\nif r: store.set('over', '1')\nelse: store.wait(['over'])"),
    Case("safe-path", "mark(sys.flags.safe_path)"),
    Case("faulthandler", "import faulthandler\nmark(faulthandler.is_enabled())"),
)  # fmt: skip
INPUT = (
    Case("input-on-rank-0", "if rank == 0: mark(input('sure? '))", given="yes\n"),
    Case("read-on-rank-1", "if rank == 1: mark(sys.stdin.read().split())", given="a b\nc\n"),
    Case("lines-on-rank-0", "if rank == 0:\n    for line in sys.stdin: mark(line.strip())", given="1\n2\n3\n"),
    Case("input-at-the-end", "try: input()\nexcept EOFError: mark('EOF')"),
    Case("breakpoint", "x = 41\nif rank == 0:\n    breakpoint()\n    mark('on')", given="!mark(x + 1)\nc\n"),
    Case("breakpoint-quit", "if rank == 0: breakpoint()\nmark('on')", given="q\n"),
    Case("stdin-is", "mark(sys.stdin.fileno(), sys.stdin.isatty(), sys.stdin.closed)", given="x"),
    Case("child-reads", "import subprocess\nif rank == 1: mark(subprocess.run(['cat'], stdout=-1).stdout)", given="bytes"),
)  # fmt: skip
TORCH = (
    Case("all-reduce", f"{GROUP}t = torch.ones(3) * rank\ndist.all_reduce(t); mark(t.tolist())\n{DOWN}"),
    Case("objects", f"{GROUP}o = [None] * world\ndist.all_gather_object(o, {{'rank': rank}}); mark(o)\n{DOWN}"),
    Case("no-destroy", f"{GROUP}dist.barrier(); mark('end')"),
    Case("subgroups", f"{GROUP}g = dist.new_group([0]); mark(dist.get_rank(g))\n{DOWN}"),
    Case("ddp", f"{MODEL}model = DDP(model)\n{TRAIN}{DOWN}"),
    Case("ddp-saves", f"{MODEL}model = DDP(model)\n{TRAIN}if rank == 0: open('saved-digest', 'w').write(str(digest(model)))\n{DOWN}"),
    Case("ddp-warns", f"import warnings\nwarnings.showwarning = lambda m, c, f, n, *a: mark(c.__name__, os.path.basename(f), n)\nwarnings.simplefilter('always')\n{MODEL}model = DDP(model, broadcast_buffers=True)\n{TRAIN}{DOWN}"),
    Case("fsdp2", f"{MODEL}from torch.distributed.fsdp import fully_shard\nfully_shard(model)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nmodel(data).square().mean().backward(); optimizer.step()\nmark(round(float(sum(p.full_tensor().abs().sum() for p in model.parameters())), 4))\n{DOWN}"),
    Case("zero", f"{MODEL}from torch.distributed.optim import ZeroRedundancyOptimizer as Z\nmodel = DDP(model)\no = Z(model.parameters(), torch.optim.SGD, lr=0.1)\nmodel(data).square().mean().backward(); o.step(); mark(digest(model))\n{DOWN}"),
    Case("join", f"{MODEL}from torch.distributed.algorithms.join import Join\nmodel = DDP(model)\nwith Join([model]):\n    for b in data[: 4 + 4 * rank].split(4): model(b).sum().backward()\nmark('joined')\n{DOWN}"),
    Case("dcp", f"{MODEL}import torch.distributed.checkpoint as dcp\ndcp.save({{'m': model.state_dict()}}, checkpoint_id='saved')\nmark(sorted(os.listdir('saved')))\n{DOWN}"),
    Case("loader-fork", f"{MODEL}from torch.utils.data import DataLoader, TensorDataset\nmark(sum(len(b[0]) for b in DataLoader(TensorDataset(data), batch_size=3, num_workers=2)))\n{DOWN}"),
    Case("sampler", f"{GROUP}from torch.utils.data import DistributedSampler\nmark(list(DistributedSampler(range(7), shuffle=False)))\n{DOWN}"),
    Case("torch-spawn", "import torch.multiprocessing as mp\ndef f(i, n): print(f'MARK {i} {n}\\n', end='', flush=True)\nif __name__ == '__main__' and rank == 0: mp.spawn(f, (2,), nprocs=2)"),
    Case("compile", "import torch\n@torch.compile(backend='eager')\ndef f(x): return x * 2 + 1\nmark(f(torch.ones(2)).tolist())"),
    Case("threads-of-torch", "import torch\nmark(torch.get_num_threads())", options=("--nproc-per-node=2",)),
    Case("rank-fails-in-training", f"{MODEL}model = DDP(model)\nif rank: raise RuntimeError('bad sample')\n{TRAIN}"),
    Case("no-sync", f"{MODEL}model = DDP(model)\nwith model.no_sync(): model(data).sum().backward()\nmodel(data).sum().backward(); mark(round(float(next(model.parameters()).grad.abs().sum()), 3))\n{DOWN}"),
)  # fmt: skip
SIGNALS = (
    *(
        Case(f"handles-{name}", _noting(name), signals=(signal.Signals[name],), options=options)
        for name, options in {
            **dict.fromkeys(("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"), ()),
            **dict.fromkeys(("SIGUSR1", "SIGUSR2"), ("--signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGUSR2",)),
        }.items()
    ),
    Case("except-keyboard-interrupt", "try:\n    import time\n    ready()\n    time.sleep(600)\nexcept KeyboardInterrupt: mark('saving')\nfinally: open(f'saved-{rank}', 'w')", signals=(signal.SIGINT,)),
    Case("only-rank-0-saves", "import time\ntry: ready(); time.sleep(600)\nexcept KeyboardInterrupt:\n    if rank: raise\n    time.sleep(5); mark('saved')", signals=(signal.SIGINT,)),
    Case("sigterm-default", f"import atexit\natexit.register(mark, 'exit')\n{WAIT}", signals=(signal.SIGTERM,)),
    Case("interrupt-in-a-child", "import subprocess\nchild = subprocess.Popen([sys.executable, '-c', \"import time\\ntry: print(1, flush=True), time.sleep(600)\\nexcept KeyboardInterrupt: pass\"], stdout=-1)\nchild.stdout.readline(); ready()\ntry: child.wait()\nexcept KeyboardInterrupt: mark(child.wait())", signals=(signal.SIGINT,)),
    Case("asyncio-interrupt", "import asyncio\nasync def f():\n    ready()\n    try: await asyncio.sleep(600)\n    except asyncio.CancelledError: mark('cancelled'); raise\ntry: asyncio.run(f())\nexcept KeyboardInterrupt: mark('interrupted')", signals=(signal.SIGINT,)),
)  # fmt: skip
DATA = "torch.randn(32, 4, generator=torch.Generator().manual_seed(1))"
LIGHTNING = (
    "import torch, lightning as L\nL.seed_everything(0, verbose=False)\n"
    "class Net(L.LightningModule):\n"
    "    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(4, 2)\n"
    "    def training_step(self, batch, i): return self.layer(batch).square().mean()\n"
    "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)\n"
    f"loader = torch.utils.data.DataLoader({DATA}, batch_size=4)\n"
    "quiet = dict(enable_progress_bar=False, enable_model_summary=False, logger=False)\n"
    "trainer = L.Trainer(accelerator='cpu', devices=world, strategy='ddp', max_epochs=2, enable_checkpointing=False, **quiet)\n"
)
FRAMEWORKS = (
    Case("accelerate", f"import torch\nfrom accelerate import Accelerator\na = Accelerator(cpu=True, gradient_accumulation_steps=2)\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(4, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nloader = torch.utils.data.DataLoader({DATA}, batch_size=4, shuffle=True)\nmodel, optimizer, loader = a.prepare(model, optimizer, loader)\nfor batch in loader:\n    with a.accumulate(model): a.backward(model(batch).square().mean()); optimizer.step(); optimizer.zero_grad()\nmark(a.num_processes, round(float(model.module.weight.detach().abs().sum()), 5))\na.end_training()", needs="accelerate"),
    Case("accelerate-fails", "from accelerate import Accelerator\na = Accelerator(cpu=True)\nmark(a.process_index)\nif a.process_index: raise RuntimeError('bad sample')\na.wait_for_everyone()", needs="accelerate"),
    Case("trainer", f"import torch\nfrom transformers import Trainer, TrainingArguments, set_seed\nset_seed(0)\nclass Net(torch.nn.Module):\n    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(4, 2)\n    def forward(self, x, labels=None): return {{'loss': self.layer(x).square().mean()}}\ndata = [{{'x': one}} for one in {DATA}]\nargs = TrainingArguments('out', use_cpu=True, max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to='none', save_strategy='no', logging_steps=1, disable_tqdm=True, remove_unused_columns=False)\nt = Trainer(Net(), args, train_dataset=data)\nt.train()\nmark([one['loss'] for one in t.state.log_history if 'loss' in one], round(float(t.model.layer.weight.detach().abs().sum()), 5))", needs="transformers"),
    Case("lightning", f"{LIGHTNING}trainer.fit(Net(), loader)\nmark(trainer.world_size, trainer.global_step, round(float(trainer.model.module.layer.weight.detach().abs().sum()), 5))", needs="lightning"),
    Case("lightning-interrupted", f"{LIGHTNING}import time\nclass Waits(L.Callback):\n    def on_train_start(self, *_): ready(); time.sleep(0.1)\n    def on_train_batch_end(self, *_): time.sleep(0.05)\ntrainer.fit_loop.max_epochs = 10_000\ntrainer.callbacks.append(Waits())\nimport signal; signal.signal(signal.SIGTERM, lambda *_: (mark('heard SIGTERM'), os._exit(0)))\ntrainer.fit(Net(), loader)", needs="lightning", signals=(signal.SIGTERM,)),
    Case("fabric", f"import torch, lightning as L\nfabric = L.Fabric(accelerator='cpu', devices=world, strategy='ddp')\nfabric.launch()\nfabric.seed_everything(0, verbose=False)\nmodel = torch.nn.Linear(4, 2)\nmodel, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))\nfor batch in fabric.setup_dataloaders(torch.utils.data.DataLoader({DATA}, batch_size=4)):\n    optimizer.zero_grad(); fabric.backward(model(batch).square().mean()); optimizer.step()\nmark(fabric.world_size, round(float(model.weight.detach().abs().sum()), 5))", needs="lightning"),
)  # fmt: skip
CASES = (*PYTHON, *ENVIRONMENT, *INPUT, *TORCH, *SIGNALS, *FRAMEWORKS)

DIFFERENCES = {  # docs/torchrun.md has the table
    "safe-path": "our interpreter runs with -P; the script's folder is on sys.path all the same",
    "stderr": "lines of stdout and of stderr come through two pipes: their order may change",
    "faulthandler": "it is on, so that a crash shows its line",
}
SAMPLE = ("input-on-rank-0", "except-keyboard-interrupt")
