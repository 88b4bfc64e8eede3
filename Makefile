# `make help` says what there is. Set-up happens by itself, in .venv, once; remove it with `make clean`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
# A name on PATH may be a shim for a version that is not there, so each one has to run and to say its version.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

# A machine without an NVIDIA driver gets one known torch; one with a driver keeps the build that suits it.
CONSTRAINTS := $(shell if command -v nvidia-smi >/dev/null 2>&1 || [ -e /proc/driver/nvidia/version ]; \
	then echo constraints.txt; else echo constraints-cpu.txt; fi)

# Where `make gpu` leaves and looks for its results, and the Python it takes before .venv is made.
GPU_OUT ?= build/gpu
GPU_PYTHON ?= python3

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# The tests start hundreds of Python processes, each of which would compile all of gpumux again.
unexport PYTHONDONTWRITEBYTECODE
# Python compiles a module where it is first imported. pip would compile all that it installs, half of which no process
# here imports, for more than a minute.
PIP := $(VENV)/bin/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS)
RUN := $(VENV)/bin/python -m
CORE := $(RUN) gpumux.compile_core
SOURCES := gpumux clients microbench tests
# A file's tests stay together, as they share a daemon. One worker more than cores, since many wait for processes they
# started; each takes half a gigabyte, so there are few.
WORKERS := $(shell cores=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))
BESIDE := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# Large blocks come from the heap, which keeps them: glibc would map the tensors of each capture anew, page by page, which
# takes 4 to 18 % of the tests' processor time in a virtual machine. Processes of jobs have such a heap anyway.
HEAP := GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=1073741824

.PHONY: help demo burst cluster-demo test test-all check test-fast core lint ruff fmt gpu clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo ## two jobs share one device, bit for bit (about two minutes with set-up)
	@$(RUN) clients.demo

burst: $(VENV)/.demo ## one job over four daemons, beside a low job at each (about a minute)
	@$(RUN) clients.burst

cluster-demo: $(VENV)/.cluster ## a gang and six low jobs over four Ray nodes, one of which is killed (about a minute)
	@$(RUN) clients.cluster

test: SELECT := -m "not extended"
test: check ## every check that a change needs, and what CI runs: lint, types, tests

test-all: SELECT :=
test-all: check ## the extended tests, too: quick runs of benchmarks, demos, long repeats (half as long again)

check: ruff $(VENV)/.bindings
	@echo "$(RUN) mypy, beside the tests"; $(RUN) mypy >$(VENV)/mypy.log 2>&1 & types=$$!; failed=0; trap "kill $$types" INT TERM; \
	echo "$(CORE) --optional"; $(CORE) --optional || failed=1; \
	echo "$(RUN) pytest $(BESIDE)"; $(HEAP) $(RUN) pytest $(BESIDE) $(SELECT) --durations=15 || failed=1; \
	wait $$types || failed=1; cat $(VENV)/mypy.log; exit $$failed

test-fast: $(VENV)/.dev $(VENV)/.bindings ## the tests that take less than ten seconds each
	$(RUN) pytest $(BESIDE) -m "not slow and not extended" --durations=5

core: $(VENV)/.dev ## compile the scheduler core, if its sources changed: daemons started from here are quicker (a quarter of a minute)
	@$(CORE)

lint: ruff ## ruff and mypy --strict, no changes made
	$(RUN) mypy

ruff: $(VENV)/.dev
	$(RUN) ruff check $(SOURCES)
	$(RUN) ruff format --check $(SOURCES)

fmt: $(VENV)/.dev ## format and mend what ruff can
	$(RUN) ruff check --fix $(SOURCES)
	$(RUN) ruff format $(SOURCES)

# The Python that is there is taken if it has all that is needed, since a machine with a GPU may have no network and a torch that fits it.
gpu: ## every GPU test, experiment and benchmark; run it again to go on where it was
	@python=$(VENV)/bin/python; [ -e $(VENV)/.dev ] || { python=$(GPU_PYTHON); \
	echo "$$python -m microbench.gpu_suite --check"; $$python -m microbench.gpu_suite --check || { \
	$(MAKE) --no-print-directory $(VENV)/.dev && python=$(VENV)/bin/python || { echo "What is missing above can't be installed" \
	"either. tools/first_contact.sh says how to bring it along as wheels." >&2; exit 1; }; }; }; \
	echo "$$python -m microbench.gpu_suite --out $(GPU_OUT)"; $$python -m microbench.gpu_suite --out $(GPU_OUT)

clean: ## remove the virtual environment, caches and builds
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .debs
	find $(SOURCES) \( -name __pycache__ -o -name __compiled__ \) -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@[ -n "$(PYTHON)" ] || { echo "gpumux needs Python 3.11 or newer with the venv module, and none was found on PATH." \
	  "Install one (on Debian: python3 and python3-venv) or say where it is: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) -V) and $(CONSTRAINTS)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# The build backend first, pinned, and no build isolation: the same build backend for everyone.
$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt constraints-cpu.txt
	@echo "installing gpumux and what the demo needs (torch is large: the first time takes minutes)"
	@$(PIP) hatchling
	@$(PIP) --no-build-isolation --editable . scikit-learn
	@touch $@

$(VENV)/.cluster: $(VENV)/.demo
	@echo "installing Ray"
	@$(PIP) --no-build-isolation --editable '.[cluster]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing what the tests and linters need"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

# Releases of cuda-bindings, which tests run on a stand-in for libcuda; without them those tests are skipped, and say so.
$(VENV)/.bindings: $(VENV)/.dev tests/stub/build.py
	@echo "installing releases of cuda-bindings to test with"
	@$(RUN) tests.stub.build
	@touch $@
