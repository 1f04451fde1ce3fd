# The same few words for people and for CI. `make` alone lists them.
# Another Python: make PYTHON=python3.13. Another place for the environment: make VENV=/tmp/venv.

PYTHON := python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := $(VENV)/installed-bench
BOOK := $(VENV)/installed-docs
STAMP := $(VENV)/installed
PARALLEL := --numprocesses 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: $(shell awk -F: '/^[a-z-]+:.*\#\# /{print $$1}' $(firstword $(MAKEFILE_LIST)))

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STAMP)  ## train the MNIST CNN on 2 processes
	$(BIN)/paceline train mnist-cnn --nproc 2

# Compiled once, or where PYTHONDONTWRITEBYTECODE is set (images of containers) each of a thousand processes would compile
# all that it imports: a fifth of a second for an agent, half of one for a rank.
COMPILE := $(BIN)/python -m compileall -q src tests/*.py

test: $(STAMP)  ## run the test-suite, without what is marked slow
	$(COMPILE)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not soak"

check: $(STAMP)  ## lint, formatting, types, import rules, then the test-suite, failed tests twice: what CI runs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/basedpyright -p benchmarks --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo
	$(COMPILE)
	$(BIN)/python -m tests.rerun $(PARALLEL)

docs: $(BOOK)  ## build the book: docs/ as pages with a search, for a browser without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "the book: $(CURDIR)/site/index.html"

format: $(STAMP)  ## put the code into its standard form
	$(BIN)/ruff format
	$(BIN)/ruff check --fix-only

lock: $(STAMP)  ## write requirements.lock: the hashes of all that is installed but torch
	$(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/python -m pip install --quiet --disable-pip-version-check pip-tools
	.ci/lock $(VENV)/lock/bin/pip-compile

soak-hostile: $(STAMP)  ## 10,000 hostile folders against every command that reads one (root; 40 minutes on 2 cores)
	for part in 0 1; do \
		PYTHONPATH=. $(BIN)/python tests/hostile/soak_hostile.py --count 10000 --part $$part 2 \
			--out benchmarks/results/hostile-$$part.json & pids="$$pids $$!"; \
	done; for pid in $$pids; do wait $$pid || failed=1; done; exit $${failed:-0}

soak-connections: $(STAMP)  ## 1,000 connections of another user to every port of a training (root; quiet)
	PYTHONPATH=. $(BIN)/python tests/hostile/soak_connections.py --out benchmarks/results/connections.json

soak-strangers: $(STAMP)  ## a third host connects 1,000 times to every port of a training on two (root; quiet)
	PYTHONPATH=. $(BIN)/python tests/hostile/soak_strangers.py --out benchmarks/results/strangers.json

soak-kills: $(STAMP)  ## kill launchers at random moments; count what survives
	$(BIN)/python tests/launch/soak_kills.py --kills 20 --after 1 9 --out benchmarks/results/kills.json -- \
		$(BIN)/paceline train mnist-cnn --nproc 2 --run-dir {dir}

soak-mutations: $(STAMP)  ## plant every bug of tests/lab/ranks, in tasks and in loops; see what verify says
	PYTHONPATH=. $(BIN)/python tests/lab/ranks/mutation_table.py --out benchmarks/results/mutations.md
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/lab/ranks/loop_table.py --out benchmarks/results/loop-mutations.md

soak-billion: $(STAMP)  ## 10^9 samples on two hosts: memory, the first batch, a resume at sample 7 x 10^8 (root; 15 minutes)
	PYTHONPATH=. $(BIN)/python tests/cluster/soak_billion.py --out benchmarks/results/billion.json

soak-nccl: $(STAMP)  ## all faults and strategies on a group that behaves as NCCL's (half an hour on 2 cores)
	PYTHONPATH=.:tests/doubles/site $(BIN)/python -m benchmarks.faults --hang-timeout 8 --out benchmarks/results/nccl-double.md
	$(BIN)/python -m pytest -q -p no:xdist -m "" tests/doubles

soak-verify: $(STAMP)  ## verify all tasks on 1, 2, 3 and 4 processes (about 15 minutes on 2 cores)
	for task in mnist-cnn mnist-resnet18 examples/own_task.py:task; do \
		name=$$(basename $${task%:*}); name=$${name%.py}; \
		$(BIN)/paceline verify $$task --ranks 1,2,3,4 > benchmarks/results/verify-$$name.txt || exit 1; \
		tail -n 1 benchmarks/results/verify-$$name.txt; \
	done

soak-bits: $(STAMP)  ## one digest at every world size, after kills, resumes and restarts (about 100 minutes on 2 cores)
	for part in digests workers launchers; do \
		PYTHONPATH=. $(BIN)/python tests/soak_bits.py --part $$part --out benchmarks/results/bits-$$part.json || exit 1; \
	done

soak-fuzz: $(STAMP)  ## damage checkpoints at random places; see that none is ever loaded
	PYTHONPATH=. $(BIN)/python tests/checkpoint/soak_fuzz.py --count 200 --out benchmarks/results/checkpoint-fuzz.json

soak-launch: $(STAMP)  ## runs on real sshd and Slurm hosts that are killed, cut and preempted (root; about an hour)
	for part in digests scripts kills lost slurm ports head; do \
		PYTHONPATH=. $(BIN)/python tests/cluster/soak_launch.py --part $$part \
			--out benchmarks/results/launch-$$part.json || exit 1; \
	done

soak-hosts: $(STAMP)  ## 100 runs of 2 to 4 ssh hosts that are lost at random, return and join (root; hours; type it again to go on)
	PYTHONPATH=. $(BIN)/python tests/cluster/soak_hosts.py --count 100 --out benchmarks/results/hosts.json

soak-faults: $(STAMP)  ## inject 80 kinds of faults, 5 times, also under torchrun; is the right rank named? (hours; type it again to go on)
	for part in here hosts; do \
		PYTHONPATH=. $(BIN)/python tests/cluster/soak_faults.py --part $$part --out benchmarks/results/faults || exit 1; \
	done

soak-watchover: $(STAMP)  ## faults under torchrun, srun and mpirun with `paceline watchover` (root; an hour; type it again to go on)
	PYTHONPATH=. $(BIN)/python tests/cluster/soak_watchover.py --out benchmarks/results/watchover

soak-silent: $(STAMP)  ## faults without any error in DDP, Accelerate and Trainer scripts; torchrun beside (30 minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]'
	PYTHONPATH=. $(BIN)/python tests/silent/soak_silent.py --out benchmarks/results/silent

soak-second: $(STAMP)  ## 22 faults, pitfalls and clean scripts of which paceline once said something wrong (10 minutes)
	PYTHONPATH=. $(BIN)/python tests/second/soak_second.py --out benchmarks/results/second.md

soak-quiet: $(STAMP)  ## an hour of what only looks like a hang, or like a silent fault; see that nothing is said
	$(BIN)/python tests/launch/soak_quiet.py --minutes 60 --out benchmarks/results/quiet.json

soak-same: $(STAMP)  ## 100 small scripts, some of Accelerate, Trainer and Lightning, under torchrun and under `paceline launch` (20 minutes; type it again to continue)
	PYTHONPATH=. $(BIN)/python tests/same/soak_same.py --out benchmarks/results/same.json

soak-sessions: $(STAMP)  ## the six scripts of examples/classic: equal to their originals, and to themselves after kills
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]'
	PYTHONPATH=. $(BIN)/python tests/sessions/soak_classic.py --out benchmarks/results/classic.json

soak-loops: $(STAMP)  ## 2,000 training loops drawn from a seed, each against the plain loop of one process (two hours; type it again to go on)
	for part in 0 1; do \
		PYTHONPATH=. $(BIN)/python tests/sessions/soak_loops.py --count 2000 --part $$part 2 \
			--out benchmarks/results/loops.json || failed=1; \
	done; exit $${failed:-0}

soak-frameworks: $(PEERS)  ## Trainer, Accelerate, Lightning, Ignite: is their user's line named? (15 minutes; type it again to go on)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]' \
		lightning==2.6.6 pytorch-lightning==2.6.6
	PYTHONPATH=. $(BIN)/python tests/frameworks/soak_frameworks.py --out benchmarks/results/frameworks

soak-ends: $(STAMP)  ## what is on disk after each way in which a training may end (root)
	PYTHONPATH=. $(BIN)/python tests/train/soak_ends.py --out benchmarks/results/ends.md

soak-check: $(STAMP)  ## plant every pitfall of docs/check.md, and check what is right (15 minutes on 2 cores)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]' lightning==2.6.6
	PYTHONPATH=. $(BIN)/python tests/check/soak_check.py --out benchmarks/results/check.md

soak-support: $(STAMP)  ## every cell of docs/support.md: each strategy with each feature (2 minutes, quiet)
	$(BIN)/python tools/support.py --check

soak-judge: $(STAMP)  ## the judge on 20,000 generated standstills
	PYTHONPATH=. $(BIN)/python tests/guard/soak_judge.py --count 20000 --out benchmarks/results/judge.json

bench-guard: $(STAMP)  ## what the hang guard costs
	$(BIN)/python benchmarks/guard.py --out benchmarks/results/guard.json

bench-checks: $(STAMP)  ## what the checks of a session cost in each step, on 1 and 2 processes (quiet)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/checks.py --out benchmarks/results/checks.json

bench-probe: $(STAMP)  ## what it costs that a script is seen from outside, on four models
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/probe.py --out benchmarks/results/probe.json

bench-thousand: $(STAMP)  ## what one head costs at 2 to 1,000 nodes (15 minutes, quiet, 16 GB of memory)
	$(BIN)/python benchmarks/thousand.py --out benchmarks/results/thousand.json

bench-startup: $(STAMP)  ## measure the time from the command to the first step
	$(BIN)/python benchmarks/startup.py --out benchmarks/results/startup.json

gpu-day: $(STAMP)  ## what must hold on a GPU; without one, on the stand-ins (10 minutes; type it again to go on)
	$(BIN)/python benchmarks/gpu_day.py --jobs 2

bench-exactness: $(STAMP)  ## what the same bits, snapshots and checkpoints cost
	$(BIN)/python benchmarks/exactness.py --out benchmarks/results/exactness.json

bench-peers: $(PEERS)  ## training speed and memory beside DDP, Accelerate, Fabric and Ignite (about 45 minutes, quiet)
	$(BIN)/python benchmarks/peers.py --out benchmarks/results/peers.json
	$(BIN)/python benchmarks/peers.py --nproc 4 --work W3 --modes default --peers --limits no-exchange \
		--out benchmarks/results/peers-4.json

SLOW := PYTHONPATH=benchmarks $(BIN)/python benchmarks/slow_network.py --out benchmarks/results/slow-network.json

bench-small-sums: $(STAMP)  ## a few numbers over ranks on two hosts, beside torch's all-reduce (root; half a minute)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/small_sums.py --out benchmarks/results/small-sums.json

bench-congestion: $(STAMP)  ## a step over slow cables, by the kernel's congestion control (root; 20 minutes)
	for link in 100mbit,10ms 200mbit; do \
		PYTHONPATH=benchmarks $(BIN)/python benchmarks/congestion.py --hosts 4 --link $$link \
			--out benchmarks/results/congestion.json || exit 1; done
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/congestion.py --hosts 2 --out benchmarks/results/congestion.json

bench-slow-network: $(STAMP)  ## two hosts joined by a slow cable: DDP and its hooks beside --compress and --local-steps (root; an hour)
	for work in W3g W3g1 W1 W3s W3gs; do $(SLOW) --work $$work --losses 192 || exit 1; done
	for work in W3g W3g1; do $(SLOW) --work $$work --rate 100mbit || exit 1; done
	for work in W1 W3s W3gs; do \
		for rate in 1gbit 100mbit 10mbit; do $(SLOW) --work $$work --rate $$rate || exit 1; done; \
	done

bench-collectives: $(STAMP)  ## sums in shared memory beside gloo and memcpy
	$(BIN)/python benchmarks/collectives.py --out benchmarks/results/collectives.json

bench-ddp-hook: $(STAMP)  ## a DDP script with and without --collectives shared, four models (15 minutes, quiet)
	$(BIN)/python benchmarks/ddp_hook.py --out benchmarks/results/ddp-hook.json

bench-fsdp-hooks: $(STAMP)  ## strategy fsdp through shared memory and over gloo, four models (15 minutes, quiet)
	$(BIN)/python benchmarks/fsdp_hooks.py --out benchmarks/results/fsdp-hooks.json

bench-mesh: $(STAMP)  ## a model that ranks share, beside the same by hand: speed, memory, bytes (5 minutes, quiet)
	$(BIN)/python benchmarks/mesh.py --out benchmarks/results/mesh.json

bench-epoch: $(STAMP)  ## one epoch of the MNIST CNN, from the command to the accuracy, beside the tutorial's script
	$(BIN)/python benchmarks/epoch.py --out benchmarks/results/epoch.json

bench-hosts: $(STAMP)  ## two hosts, network namespaces with a link of 1 Gbit/s between them (root)
	$(BIN)/python benchmarks/two_hosts.py --rate 1gbit --per-host 2 --out benchmarks/results/two-hosts.json

bench-scale: $(STAMP)  ## does `paceline scale` name what was planted, and is its estimate right? (root)
	$(BIN)/python benchmarks/scale_causes.py --out benchmarks/results/scale.json

bench-ladder: $(STAMP)  ## the tables of docs/ladder (20 minutes; quiet)
	$(BIN)/paceline compare mnist-resnet18 --nproc 2 --rounds 5 --steps 10 --warmup 4 --out benchmarks/results/ladder.json
	$(BIN)/python tools/includes.py

bench-report: $(STAMP)  ## is the page's first sentence right, and how fast is it on a million events? (5 minutes; root: hosts, too)
	$(BIN)/python benchmarks/report_causes.py --out benchmarks/results/report-causes.json
	folder=$$(mktemp -d) && $(BIN)/paceline train mnist-cnn --nproc 2 --steps 80 --run-dir $$folder/run && \
		$(BIN)/python benchmarks/report.py $$folder/run --out benchmarks/results/report.json; rm -rf $$folder

bench-summary: $(STAMP)  ## which goals do the committed results reach?
	$(BIN)/python benchmarks/summary.py

transcripts: $(STAMP)  ## type the commands of docs/launch on real hosts and of docs/ladder here; write down what comes out (root)
	$(BIN)/python docs/launch/transcripts.py
	$(BIN)/python tools/typed.py

clean:  ## remove the environment and the caches; runs/ stays
	rm -rf $(VENV) dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Always with the constraints: whatever depends on torch may otherwise bring another torch. `venv` on an environment
# that is there already only refreshes it, and pip is fast then. The stamp comes last, so a broken install is repeated.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		f"paceline needs Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}. Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(PEERS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

$(BOOK): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
