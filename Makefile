# `make demo` and `make test` set everything up by themselves; the other targets use the same .venv.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast check soak bench clean

PYTHON ?= python3
BIN := .venv/bin
TORCH := torch==2.13.0
export OMP_NUM_THREADS ?= 1
PYTEST := $(BIN)/python -m pytest
PAIR := -n 2 --dist worksteal  # two tests at a time: those of many ranks mostly wait

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# torch first and pinned: a range asked for by another package could take a build for other hardware.
.venv/installed: setup.py
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check setuptools wheel
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[dev]'
	touch $@

install: .venv/installed  ## Make .venv and install the project with its developer tools

demo: .venv/installed  ## Corpus, tokenizer, 3D-parallel training, resume on another layout, a sample of text
	BIN=$(BIN) bash tools/demo.sh demo_run

test: .venv/installed  ## The whole CI tier
	$(PYTEST) $(PAIR) -m "not soak and not slurm"
	$(PYTEST) -m slurm  # one at a time: two clusters on one machine would take the same ports

test-fast: .venv/installed  ## The quick part of it, under a minute
	$(PYTEST) $(PAIR) -m "not soak and not slow and not slurm"

soak: .venv/installed  ## Everything, long batteries included
	$(PYTEST)

bench: .venv/installed  ## This project beside its peers on CPUs, into docs/performance.md; FLAGS="--deepspeed PYTHON ..."
	$(BIN)/python -m benchmarks.peers --write docs/performance.md $(FLAGS)

check: .venv/installed  ## ruff, mypy --strict, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) tests/test_layering.py

clean:  ## Remove what the targets made
	rm -rf .venv demo_run build *.egg-info
