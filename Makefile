# make demo       trains a small GPT with and without the executor and shows the difference
# make test       runs the tests; tests that need a GPU are skipped without one
# make test-fast  the same without tests of thunder, the benchmark, Triton's interpreter and separate processes
# make test-all   also runs tests that repeat others at a larger scale, such as all models through all front ends
# make check      checks style, the order of imports and types, then runs `make test`, as .ci/run does
# make lint       the same without the tests
# make matrix     runs a short suite on every supported version of Python, PyTorch, thunder, transformers: about an hour
# make targets    compiles every Triton kernel for every GPU in docs/support.md, without a GPU: a few minutes
# make docs       builds the pages in docs/ with an API reference, as a site in build/site
# make traces     regenerates the traces in traces/
# make mutants    breaks the engine at random places, one at a time, and shows which changes the tests do not notice
#
# Each target first creates the environment in .venv, and updates it when pyproject.toml has changed.
#
#   make demo ARGS="--steps 50 --text FILE"
#   make test ARGS="-k ignore_index"
#   make mutants ARGS="--count 50 --seed 1 --tests tests/api/test_numerics.py"
#   make test VENV=.venv311 PYTHON=python3.11
#   make matrix ARGS="-s 'matrix(python 3.11, torch 2.8)'"

SHELL := /bin/bash

# The newest torch that nvFuser has a wheel for.
TORCH := torch==2.10.0

# nvFuser has wheels for 3.12 and 3.10. A name on PATH may be a shim that does not work, so each candidate is run.
CANDIDATES := python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) python3 python3.13 python3.11 python3.10
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in $(CANDIDATES); do "$$p" -c '$(USABLE)' 2>/dev/null && { echo "$$p"; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# By default, threads of a process spin for so long that two processes on the same cores take 30 times as long as one.
# A shorter spin costs nothing if a process runs alone.
GOMP_SPINCOUNT ?= 10000
export GOMP_SPINCOUNT

.PHONY: check demo docs lint matrix mutants targets test test-all test-fast traces

demo: $(STAMP)
	$(BIN)/python examples/train_gpt.py $(ARGS)

# Tests run in parallel, on small matrices: with one thread per process, they take 18% less time on two cores.
mutants targets test test-all test-fast: export OMP_NUM_THREADS := 1
# The tests of a file share fixtures and stay in one process, unless an idle process steals them.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal
LONGER := bench disk_cache examples imports integrations interpreted model_zoo modules pages patterns processes \
	thunder thunder_ranks trace_command traces two_ranks

test: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

test-fast: $(STAMP)
	$(PYTEST) -m "not slow and not inductor" $(LONGER:%=--ignore-glob='*/test_%.py') $(ARGS)

test-all: $(STAMP)
	$(PYTEST) $(ARGS)

targets: export ALL_TARGETS := 1
targets: $(STAMP)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 tests/kernels/test_targets.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

check: lint
	$(MAKE) test

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

matrix: $(STAMP)
	$(BIN)/nox $(ARGS)

mutants: $(STAMP)
	$(BIN)/python tests/mutate.py $(ARGS)

traces: $(STAMP)
	$(BIN)/python traces/regenerate.py $(ARGS)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "found no Python from 3.10 to 3.13 with venv; name one: make PYTHON=…" >&2; exit 1; }
	@echo "Installing into $(VENV) with $(PYTHON): some minutes, the first time"
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'  # The first version with --group
	@$(BIN)/python -m pip install --quiet $(TORCH) --editable '.[nvfuser,examples]' --group lint --group test --group matrix
	@touch $@
