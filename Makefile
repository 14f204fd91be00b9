# Everything runs from a fresh checkout that has only Python 3.11 or newer and make (GNU 3.81 will do).

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Written last, so an interrupted set-up is redone. Line 1: where the checkout was; line 2: PYTHON.
STAMP := $(VENV)/.bitdial-setup

# Cases of `make test-long`.
FILES ?= 100000
KILLS ?= 200
SWITCHES ?= 10000

BENCH ?= $(wildcard benchmarks/[!_]*.py)
PYTEST_ARGS ?=
CPUINFO ?= /proc/cpuinfo

# Waiting OpenMP threads sleep: spinning, two torch processes on two cores run 10 times slower.
OMP_WAIT_POLICY ?= PASSIVE
export OMP_WAIT_POLICY

# Some virtual machines show the AMX flags but hide AMX's CPUID leaf (29): there oneDNN dies of
# SIGILL in bf16 unless it is told to stop one instruction set below. Elsewhere nothing is set.
AMX_HIDDEN := $(shell awk '/^flags/ && / amx_tile( |$$)/ { amx = 1 } \
	/^cpuid level/ && $$NF + 0 < 29 { low = 1 } \
	END { if (amx && low) print "yes" }' $(CPUINFO) 2>/dev/null)
ifeq ($(AMX_HIDDEN),yes)
ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
export ONEDNN_MAX_CPU_ISA
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long wheel-test docs lint format bench clean FORCE

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "  Variables: PYTHON=$(PYTHON)  PYTEST_ARGS='-k packing'  BENCH=benchmarks/one.py"

setup: $(STAMP)  ## make .venv and install bitdial with all extras (instant when up to date)

demo: $(STAMP)  ## train, ship and switch a small network; results in demo-out
	$(VENV)/bin/bitdial demo --out demo-out

# The tests start a hundred processes: what Python compiles once is kept, even where the caller's shell says otherwise.
# worksteal: each of the two workers begins with one half, whole files, so that what a file shares is made once.
test: export PYTHONDONTWRITEBYTECODE =
test: lint  ## lint, then the tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

test-long: $(STAMP)  ## damaged files, kills, switches by the thousand: about an hour; results/reliability.json
	OMP_NUM_THREADS=1 $(PY) tests/long/demo.py
	OMP_NUM_THREADS=1 $(PY) tests/long/switches.py --count $(SWITCHES)
	OMP_NUM_THREADS=1 $(PY) tests/long/kills.py --count $(KILLS)
	OMP_NUM_THREADS=1 $(PY) tests/long/damaged_files.py --count $(FILES)

wheel-test: $(STAMP)  ## build the wheel, install it into an empty environment, run README's ten lines there
	OMP_NUM_THREADS=1 $(PY) tests/packaging/wheel.py

docs: $(STAMP)  ## the documentation as pages in site/; a broken link is an error
	$(PY) docs/pages.py
	$(PY) -m mkdocs build  # --quiet would turn strict off

lint: $(STAMP)  ## ruff check, ruff format --check, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)  ## fix what ruff can fix, and format
	$(PY) -m ruff check --fix --exit-zero --quiet .
	$(PY) -m ruff format .

bench: $(STAMP)  ## run the benchmarks (or those named by BENCH=)
	@test -n "$(strip $(BENCH))" || { echo "no scripts in benchmarks/"; exit 1; }
	@set -e; for script in $(BENCH); do echo "== $$script"; $(PY) $$script; done

clean:  ## remove caches and outputs (keeps .venv; delete it by hand to start over)
	rm -rf demo-out dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv that came along when the checkout was moved or copied still imports the old place's
# sources, so the install is redone; so is it when the Python that .venv points to has gone, or
# when the caller names another PYTHON.
ifneq ($(shell test -x $(PY) && sed -n 1p $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif
ifneq ($(origin PYTHON),file)
ifneq ($(shell sed -n 2p $(STAMP) 2>/dev/null),$(PYTHON))
$(STAMP): FORCE
NEW_PYTHON := yes
endif
endif

VERSION_OK := import sys; sys.exit(sys.version_info < (3, 11))
VERSION := import sys; print("%d.%d" % sys.version_info[:2])

# An environment that works is kept and updated. It is made anew if it is broken or too old, or if
# the caller names a PYTHON of another version.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(PY) -c '$(VERSION_OK)' 2>/dev/null || ! $(PY) -m pip --version >/dev/null 2>&1 || \
	   { test -n "$(NEW_PYTHON)" && \
	     test "$$($(PY) -c '$(VERSION)')" != "$$($(PYTHON) -c '$(VERSION)' 2>/dev/null)"; }; then \
	  $(PYTHON) -c '$(VERSION_OK)' 2>/dev/null || { \
	    echo "bitdial needs Python 3.11 or newer, but '$(PYTHON)' says: $$($(PYTHON) -V 2>&1)" >&2; \
	    echo "Install one and name it: make setup PYTHON=python3.12" >&2; exit 1; }; \
	  echo "Making $(VENV) with $$($(PYTHON) -V)"; \
	  $(PYTHON) -m venv --clear $(VENV); \
	fi
	@rm -f $@
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev,demo]' -c constraints.txt
	@printf '%s\n' '$(CURDIR)' '$(PYTHON)' > $@
