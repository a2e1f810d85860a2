# The commands of this repository. `make demo` and `make test` do all their own set-up in .venv.
SHELL := /bin/bash
# an activated .venv is not the Python that makes .venv: scripts/setup.sh would remove what it runs on
export PATH := $(subst $(CURDIR)/.venv/bin:,,$(PATH))
# -P: the checkout's folders must not become importable under their bare names; transformers, for one, looks for a `kernels`
# bytecode is kept, also where the environment says otherwise: tests start hundreds of processes
PYTEST := PYTHONDONTWRITEBYTECODE= .venv/bin/python -P -m pytest
.PHONY: demo test tests test-long test-versions chaos grid faults test-gpu test-slurm signals soak lint docs typing-tree bench bench-gpu tables reference clean

demo:  ## less than five minutes: a language model trained, killed, resumed, and writing
	@scripts/setup.sh
	@.venv/bin/python -P -m baton.launcher.demo

# which tests go together, and which are begun first: tests/conftest.py. Four processes for two cores: some tests wait for a time
# limit or for SLURM
test:  ## everything that runs without a GPU
	@scripts/setup.sh test lint oracles
	@$(MAKE) --no-print-directory -j 2 $(if $(filter output-sync,$(.FEATURES)),-O) lint tests

# its lines as they come; what `make lint` says beside it is printed as a whole
tests:
	+@$(PYTEST) -q -n 4 --dist loadgroup --no-loadscope-reorder

test-long:  ## the long forms: every mixer learns, 100,000 steps of every state
	@scripts/setup.sh test oracles
	$(PYTEST) -q -m long --timeout 1800 -n 2 --dist loadgroup

test-versions:  ## the core of the tests on the oldest and the newest versions of everything, 6 GB each; writes docs/versions.md
	@scripts/setup.sh test
	.venv/bin/python -P scripts/versions.py

chaos:  ## a hundred runs killed, damaged and starved at random moments; each ends as if nothing had been (ten minutes on two cores)
	@scripts/setup.sh test
	$(PYTEST) -q -m "long or not long" --timeout 600 tests/launcher/test_chaos.py

grid:  ## the equality grid: every mixer on every layout; writes docs/equality-grid.md
	@scripts/setup.sh test
	.venv/bin/python -P tests/equality_grid.py

faults:  ## thirty faults planted one at a time, and the test that finds each; writes docs/planted-faults.md
	@scripts/setup.sh test oracles
	.venv/bin/python -P tests/planted_faults.py

test-gpu:  ## what needs a GPU; 6 processes share the GPUs, since the time goes into compiling and into communicators
	@scripts/setup.sh test
	$(PYTEST) -q -m gpu -n 6

test-slurm:  ## the long forms on a SLURM of four nodes that the tests start on this machine; needs root; keeps its log
	@scripts/setup.sh test
	@set -o pipefail; { echo "$$ make test-slurm   ($$(git describe --always --dirty), $$(nproc) cores, load before $$(cut -d' ' -f1 /proc/loadavg))"; \
	$(PYTEST) -v --no-header --disable-warnings -m "not long" --durations=0 tests/slurm 2>&1; } | tee tests/slurm/test-slurm.log

signals:  ## SIGTERM and SIGUSR1 at 200 random moments of training on a CPU; keeps its log
	@scripts/setup.sh test
	@set -o pipefail; { echo "$$ make signals   ($$(git describe --always --dirty), $$(nproc) cores, load before $$(cut -d' ' -f1 /proc/loadavg))"; \
	$(PYTEST) -v --no-header --disable-warnings -m long -k 200 --timeout 3600 -rP tests/slurm/test_signals.py 2>&1; } | tee tests/slurm/signals.log

soak:  ## 22 minutes of faults, one a minute in the mean, on the same SLURM; goodput, and every second accounted for
	@scripts/setup.sh test
	.venv/bin/python -P tests/slurm/soak.py

lint: typing-tree
	@scripts/setup.sh test lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	@$(MAKE) --no-print-directory docs

docs: typing-tree  ## the documentation's site, with an API reference from the docstrings, in build/site
	@scripts/setup.sh test lint
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -P -m mkdocs build --strict

# mypy does not follow an editable install: show it the packages under their names
typing-tree:
	@mkdir -p build/typing/baton
	@for d in kernels data_pipeline parallel models training launcher slurm; do ln -sfn ../../../$$d build/typing/baton/$$d; done
	@for f in __init__.py py.typed; do ln -sfn ../../../baton/$$f build/typing/baton/$$f; done

bench:  ## the benchmarks that run on a CPU; results go to benchmarks/results
	@scripts/setup.sh
	.venv/bin/python benchmarks/data_stream.py
	.venv/bin/python benchmarks/checkpoint.py
	.venv/bin/python benchmarks/cpu_scan.py

bench-gpu:  ## those that need GPUs, on all there are, in SECONDS (3600)
	@scripts/setup.sh test
	.venv/bin/python benchmarks/on_gpus.py --seconds $(or $(SECONDS),3600)

reference:  ## docs/settings.md and docs/commands.md, from the classes of settings and the commands' parsers
	@scripts/setup.sh
	.venv/bin/python -P scripts/reference.py

tables:  ## docs/measured.md and README's figures, from benchmarks/results
	@scripts/setup.sh
	.venv/bin/python benchmarks/tables.py

clean:
	rm -rf .venv .venvs build demo *.egg-info
