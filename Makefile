# `make train` trains a tiny MoE GPT without and with offload, and shows that the results are bitwise identical.
# Needs Python 3.10 to 3.13 and make. Everything else goes into .venv. A CUDA GPU is used when there is one.

# Python of a version: pyenv's first, since its stand-ins on the PATH fail where the version is not switched on.
find_python = $(or $(lastword $(sort $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python))),$(shell command -v python$(1)))
# Python 3.12 where there is one: newer megatron-core needs it.
PYTHON ?= $(or $(call find_python,3.12),python3)
OLDER_PYTHON ?= $(or $(call find_python,3.11),$(call find_python,3.10))
NEWER_TORCH ?= 2.14.1
ARGUMENTS ?= arguments/tiny_moe.sh
DATA ?=
STEPS ?=
WORKERS ?= 2

VENV := .venv
DOCS := .venv-docs
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOKE := $(addprefix tests/unit/,launch megatron_interface megatron/test_sites.py megatron/test_waits.py \
	megatron/test_training_graphs.py megatron/test_graph_flags.py)

.DEFAULT_GOAL := help
.PHONY: help install train test quick slow smoke older versions check package pages docs

help:  ## Show what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

install: $(STAMP)  ## Install fgoffload, megatron-core and the test tools into .venv

train: $(STAMP)  ## Train without and with offload: DATA=text.txt ARGUMENTS=arguments/tiny_moe.sh STEPS=10
	@$(BIN)/fgoffload train "$(ARGUMENTS)" $(if $(DATA),--data "$(DATA)") $(if $(STEPS),--steps "$(STEPS)")

test: $(STAMP)  ## Run the tests that take seconds, on WORKERS=2 processes; those that need a GPU skip themselves without one
	@# The tests' models are tiny: a second thread for each operator costs more than it brings, and a second worker does not.
	@# A worker that dies ends the run: pytest-xdist 3.8.0 starts another, and with --dist=loadfile then waits for ever.
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" --numprocesses=$(WORKERS) --dist=loadfile --max-worker-restart=0

quick: $(STAMP)  ## Run the tests of the engine, the public interface, plans and one Megatron model in under a minute
	@# Collecting all files of tests takes longer than the quick tests themselves: only those that use the marker are given.
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "quick and not slow" --numprocesses=$(WORKERS) --dist=loadfile --max-worker-restart=0 \
		$$(grep -rl --include='test_*.py' 'pytest\.mark\.quick' tests)

slow: $(STAMP) versions  ## Run the tests that take minutes: long random runs, thousands of steps, compilers, other versions
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout=1800 --numprocesses=$(WORKERS) --dist=loadfile --max-worker-restart=0

smoke: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" --numprocesses=$(WORKERS) --dist=loadfile --max-worker-restart=0 $(SMOKE)

older:  ## Run the tests of Megatron's interface, sites and waits on Python 3.11 and megatron-core 0.16.1, in .venv-older
	@$(if $(OLDER_PYTHON),$(MAKE) VENV=.venv-older PYTHON=$(OLDER_PYTHON) smoke,echo "No Python 3.10 or 3.11: left out.")

versions: $(STAMP)  ## Run such tests on other versions of megatron-core, transformers and torch; `make slow` does so too
	@.ci/versions "$(BIN)/python" "$(NEWER_TORCH)" $(SMOKE)

check: $(STAMP)  ## Check format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

package: $(BIN)/python  ## Build wheel and sdist into dist/, and try the wheel in an empty environment
	@.ci/package $(BIN)/python

pages: $(STAMP)  ## Write the tables of docs/reference from the code
	@$(BIN)/python .ci/pages.py

docs: $(DOCS)/.installed  ## Build the site into site/, and fail on a broken link or a table that differs from the code
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

$(DOCS)/.installed: pyproject.toml .ci/constraints.txt | $(BIN)/python
	@$(BIN)/python -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[docs]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13) and "Python 3.10 to 3.13 is needed, this is %d.%d. Give one, as in: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[megatron,test]'
	@touch $@
