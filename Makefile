# The same targets for developers and for CI. `make` alone lists them.
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

# Compile once. Otherwise, if PYTHONDONTWRITEBYTECODE is set (container images), each of a thousand processes would compile
# all modules that it imports: 0.2 s for an agent, 0.5 s for a rank.
COMPILE := $(BIN)/python -m compileall -q src tests/*.py

test: $(STAMP)  ## run the test suite without the tests marked slow
	$(COMPILE)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not soak"

check: $(STAMP)  ## lint, formatting, types, import rules, test suite; failed tests run twice (this is what CI runs)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/basedpyright -p benchmarks --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo
	$(COMPILE)
	$(BIN)/python -m tests.rerun $(PARALLEL)

docs: $(BOOK)  ## build docs/ as HTML pages with a search, readable without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "the book: $(CURDIR)/site/index.html"

format: $(STAMP)  ## format the code
	$(BIN)/ruff format
	$(BIN)/ruff check --fix-only

lock: $(STAMP)  ## write requirements.lock: the hashes of all installed packages except torch
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

soak-strangers: $(STAMP)  ## a third host connects 1,000 times to every port of a training on two hosts (root; quiet)
	PYTHONPATH=. $(BIN)/python tests/hostile/soak_strangers.py --out benchmarks/results/strangers.json

soak-kills: $(STAMP)  ## kill launchers at random moments; count the runs that survive
	$(BIN)/python tests/launch/soak_kills.py --kills 20 --after 1 9 --out benchmarks/results/kills.json -- \
		$(BIN)/paceline train mnist-cnn --nproc 2 --run-dir {dir}

soak-mutations: $(STAMP)  ## plant every bug of tests/lab/ranks in tasks and loops; record what verify reports
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

soak-replay: $(STAMP)  ## 50 random steps, repeated on one process with the same bits (about 10 minutes)
	PYTHONPATH=. $(BIN)/python tests/soak_replay.py --out benchmarks/results/replay.json

soak-balance: $(STAMP)  ## --balance: steps against the harmonic limit, and when slowdowns are corrected (root; quiet; 15 minutes)
	for part in slowdowns sleeps speed; do \
		$(BIN)/python benchmarks/balance.py --part $$part --out benchmarks/results/balance.json || exit 1; \
	done

soak-diff: $(STAMP)  ## pairs of runs that differ by one planted cause: the step and the layer are found (about 10 minutes)
	PYTHONPATH=. $(BIN)/python tests/soak_diff.py --out benchmarks/results/diff.json

soak-audit: $(STAMP)  ## flip 1,000 bits in forwards and backwards: found, on the right rank; an hour without faults (repeat to continue)
	for part in once always cost healthy; do \
		PYTHONPATH=. $(BIN)/python tests/soak_audit.py --part $$part --out benchmarks/results/audit.json || exit 1; \
	done

soak-fuzz: $(STAMP)  ## damage checkpoints at random places; see that none is ever loaded
	PYTHONPATH=. $(BIN)/python tests/checkpoint/soak_fuzz.py --count 200 --out benchmarks/results/checkpoint-fuzz.json

soak-launch: $(STAMP)  ## runs on real sshd and Slurm hosts that are killed, disconnected and preempted (root; about an hour)
	for part in digests scripts kills slurm ports head; do \
		PYTHONPATH=. $(BIN)/python tests/cluster/soak_launch.py --part $$part \
			--out benchmarks/results/launch-$$part.json || exit 1; \
	done

soak-hosts: $(STAMP)  ## 100 runs of 2 to 4 ssh hosts that are lost at random, return and join (root; hours; repeat to continue)
	PYTHONPATH=. $(BIN)/python tests/cluster/soak_hosts.py --count 100 --out benchmarks/results/hosts.json

soak-faults: $(PEERS)  ## inject 80 kinds of faults, 5 times, also under torchrun; check that the right rank is named (hours; repeat to continue)
	for part in here hosts; do \
		PYTHONPATH=. $(BIN)/python tests/cluster/soak_faults.py --part $$part --out benchmarks/results/faults || exit 1; \
	done
	PYTHONPATH=. $(BIN)/python tests/cluster/soak_faults.py --part here --launchers torchrun accelerate fabric \
		--out benchmarks/results/faults-peers

soak-watchover: $(STAMP)  ## faults under torchrun, srun and mpirun with `paceline watchover` (root; an hour; repeat to continue)
	PYTHONPATH=. $(BIN)/python tests/cluster/soak_watchover.py --out benchmarks/results/watchover

soak-silent: $(STAMP)  ## faults without any error in DDP, Accelerate and Trainer scripts, also under torchrun (30 minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]'
	PYTHONPATH=. $(BIN)/python tests/silent/soak_silent.py --out benchmarks/results/silent

soak-second: $(STAMP)  ## 8 faults and pitfalls, and 5 clean scripts, that others wrote (12 minutes)
	PYTHONPATH=. $(BIN)/python tests/second/soak_second.py --out benchmarks/results/second.md

soak-quiet: $(STAMP)  ## an hour of runs that only look like a hang or a silent fault; check that nothing is reported
	$(BIN)/python tests/launch/soak_quiet.py --minutes 60 --out benchmarks/results/quiet.json

soak-same: $(STAMP)  ## 100 small scripts, some of Accelerate, Trainer and Lightning, under torchrun and under `paceline launch` (20 minutes; repeat to continue)
	PYTHONPATH=. $(BIN)/python tests/same/soak_same.py --out benchmarks/results/same.json

soak-sessions: $(STAMP)  ## the six scripts of examples/classic: equal to their originals, and to themselves after kills
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]'
	PYTHONPATH=. $(BIN)/python tests/sessions/soak_classic.py --out benchmarks/results/classic.json

soak-loaders: $(STAMP)  ## 200 random kills of loops over streamed, length-grouped and packed data (40 minutes; repeat to continue)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]'
	PYTHONPATH=. $(BIN)/python tests/sessions/soak_loaders.py --kills 200 --out benchmarks/results/loaders.json

soak-lora: $(STAMP)  ## LoRA on GPT-2, Llama and BERT, four strategies, 1 to 3 ranks, each killed and resumed (30 minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]'
	PYTHONPATH=. $(BIN)/python tests/sessions/soak_lora.py --out benchmarks/results/lora.json

soak-loops: $(STAMP)  ## 2,000 training loops drawn from a seed, each against the plain loop of one process (two hours; repeat to continue)
	for part in 0 1; do \
		PYTHONPATH=. $(BIN)/python tests/sessions/soak_loops.py --count 2000 --part $$part 2 \
			--out benchmarks/results/loops.json || failed=1; \
	done; exit $${failed:-0}

soak-stops: $(PEERS)  ## stop Trainer, Lightning and Accelerate scripts at 100 random moments; resume to equal weights (an hour; repeat to continue)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]' lightning==2.6.6
	PYTHONPATH=. $(BIN)/python tests/stops/soak_stops.py --count 100 --out benchmarks/results/stops.json

soak-frameworks: $(PEERS)  ## Trainer, Accelerate, Lightning, Ignite: check that the line of the user's script is named (15 minutes; repeat to continue)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]' \
		lightning==2.6.6 pytorch-lightning==2.6.6
	PYTHONPATH=. $(BIN)/python tests/frameworks/soak_frameworks.py --out benchmarks/results/frameworks

soak-ends: $(STAMP)  ## what is on disk after each way in which a training may end (root)
	PYTHONPATH=. $(BIN)/python tests/train/soak_ends.py --out benchmarks/results/ends.md

soak-check: $(STAMP)  ## run --check on every pitfall of docs/check.md and on correct scripts (15 minutes on 2 cores)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]' lightning==2.6.6
	PYTHONPATH=. $(BIN)/python tests/check/soak_check.py --out benchmarks/results/check.md

soak-support: $(STAMP)  ## every cell of docs/support.md: each strategy with each feature (2 minutes, quiet)
	$(BIN)/python tools/support.py --check

soak-judge: $(STAMP)  ## the diagnosis of 20,000 generated hangs
	PYTHONPATH=. $(BIN)/python tests/guard/soak_judge.py --count 20000 --out benchmarks/results/judge.json

bench-guard: $(STAMP)  ## the cost of the hang guard
	$(BIN)/python benchmarks/guard.py --out benchmarks/results/guard.json

bench-checks: $(STAMP)  ## the cost of a session's checks in each step, on 1 and 2 processes (quiet)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/checks.py --out benchmarks/results/checks.json

bench-step: $(STAMP)  ## the host's time in a step of a session, compared with a plain loop and with DDP (quiet)
	$(BIN)/python benchmarks/step.py --out benchmarks/results/step.json

bench-probe: $(STAMP)  ## the cost of observing a script, on four models
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/probe.py --out benchmarks/results/probe.json

bench-thousand: $(STAMP)  ## the cost of the coordinator at 2 to 1,000 nodes (15 minutes, quiet, 16 GB of memory)
	$(BIN)/python benchmarks/thousand.py --out benchmarks/results/thousand.json

bench-startup: $(STAMP)  ## measure the time from the command to the first step
	$(BIN)/python benchmarks/startup.py --out benchmarks/results/startup.json

gpu-day: $(STAMP)  ## all GPU tests and benchmarks; without a GPU, on simulators (10 minutes; repeat to continue)
	$(BIN)/python benchmarks/gpu_day.py

bench-exactness: $(STAMP)  ## the cost of identical bits, snapshots and checkpoints
	$(BIN)/python benchmarks/exactness.py --out benchmarks/results/exactness.json

bench-peers: $(PEERS)  ## training speed and memory, compared with DDP, Accelerate, Fabric and Ignite (about 45 minutes, quiet)
	$(BIN)/python benchmarks/peers.py --out benchmarks/results/peers.json
	$(BIN)/python benchmarks/peers.py --nproc 4 --work W3 --modes default --peers --limits no-exchange \
		--out benchmarks/results/peers-4.json

SLOW := PYTHONPATH=benchmarks $(BIN)/python benchmarks/slow_network.py --out benchmarks/results/slow-network.json

bench-small-sums: $(STAMP)  ## sums of a few numbers over two hosts, compared with torch's all-reduce (root; half a minute)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/small_sums.py --out benchmarks/results/small-sums.json

bench-congestion: $(STAMP)  ## a step over slow links, by the kernel's congestion control (root; 20 minutes)
	for link in 100mbit,10ms 200mbit; do \
		PYTHONPATH=benchmarks $(BIN)/python benchmarks/congestion.py --hosts 4 --link $$link \
			--out benchmarks/results/congestion.json || exit 1; done
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/congestion.py --hosts 2 --out benchmarks/results/congestion.json

bench-slow-network: $(STAMP)  ## two hosts on a slow link: --compress and --local-steps, compared with DDP and its hooks (root; an hour)
	for work in W3g W3g1 W1 W3s W3gs; do $(SLOW) --work $$work --losses 192 || exit 1; done
	for work in W3g W3g1; do $(SLOW) --work $$work --rate 100mbit || exit 1; done
	for work in W1 W3s W3gs; do \
		for rate in 1gbit 100mbit 10mbit; do $(SLOW) --work $$work --rate $$rate || exit 1; done; \
	done

bench-collectives: $(STAMP)  ## sums in shared memory, compared with gloo and memcpy
	$(BIN)/python benchmarks/collectives.py --out benchmarks/results/collectives.json

bench-ddp-hook: $(STAMP)  ## a DDP script with and without --collectives shared, four models (15 minutes, quiet)
	$(BIN)/python benchmarks/ddp_hook.py --out benchmarks/results/ddp-hook.json

bench-fsdp-hooks: $(STAMP)  ## strategy fsdp through shared memory and over gloo, four models (15 minutes, quiet)
	$(BIN)/python benchmarks/fsdp_hooks.py --out benchmarks/results/fsdp-hooks.json

bench-mesh: $(STAMP)  ## tensor parallelism, compared with a manual implementation: speed, memory, bytes (5 minutes, quiet)
	$(BIN)/python benchmarks/mesh.py --out benchmarks/results/mesh.json

bench-epoch: $(STAMP)  ## one epoch of the MNIST CNN, from the command to the accuracy, compared with the tutorial's script
	$(BIN)/python benchmarks/epoch.py --out benchmarks/results/epoch.json

bench-hosts: $(STAMP)  ## two hosts, network namespaces with a link of 1 Gbit/s between them (root)
	$(BIN)/python benchmarks/two_hosts.py --rate 1gbit --per-host 2 --out benchmarks/results/two-hosts.json

bench-scale: $(STAMP)  ## check the causes and estimates of `paceline scale` (root)
	$(BIN)/python benchmarks/scale_causes.py --out benchmarks/results/scale.json

bench-ladder: $(STAMP)  ## the tables of docs/ladder (12 minutes, quiet)
	$(BIN)/paceline compare examples/own_transformer.py:large --nproc 2 --rounds 4 --steps 10 --warmup 4 \
		--out benchmarks/results/ladder.json
	$(BIN)/python tools/includes.py

bench-report: $(STAMP)  ## check the causes that reports name; time a report of a million events (5 minutes; with root also on hosts)
	$(BIN)/python benchmarks/report_causes.py --out benchmarks/results/report-causes.json
	folder=$$(mktemp -d) && $(BIN)/paceline train mnist-cnn --nproc 2 --steps 80 --run-dir $$folder/run && \
		$(BIN)/python benchmarks/report.py $$folder/run --out benchmarks/results/report.json; rm -rf $$folder

bench-summary: $(STAMP)  ## compare the committed results with the goals
	$(BIN)/python benchmarks/summary.py

transcripts: $(STAMP)  ## run the commands of docs/launch and docs/ladder and write their output into the pages (root)
	$(BIN)/python docs/launch/transcripts.py
	$(BIN)/python tools/typed.py

clean:  ## remove the environment and the caches; runs/ stays
	rm -rf $(VENV) dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Always with the constraints: a package that depends on torch may otherwise install a different torch. `venv` only
# refreshes an existing environment. The stamp comes last, so a failed install is repeated.
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
