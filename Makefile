# `make train` trains a tiny MoE GPT with and without offload, and shows that the results are bitwise identical.
# Needs Python 3.10 to 3.13 and make, and installs everything else into .venv. Uses a CUDA GPU if there is one.

# Path of a Python version. pyenv's own folder is first, since its shims on the PATH fail for versions that are not activated.
find_python = $(or $(lastword $(sort $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python))),$(shell command -v python$(1)))
# megatron-core 0.17 and newer need Python 3.12.
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

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

install: $(STAMP)  ## Install fgoffload, megatron-core and the test tools into .venv

train: $(STAMP)  ## Train with and without offload: DATA=text.txt ARGUMENTS=arguments/tiny_moe.sh STEPS=10
	@$(BIN)/fgoffload train "$(ARGUMENTS)" $(if $(DATA),--data "$(DATA)") $(if $(STEPS),--steps "$(STEPS)")

test: $(STAMP)  ## Run the fast tests on WORKERS=2 processes; tests that need a GPU are skipped without one
	@# If a worker dies, the run ends. Otherwise pytest-xdist 3.8.0 would restart it and, with --dist=loadfile, wait forever.
	@$(BIN)/python -m pytest -m "not slow" --numprocesses=$(WORKERS) --dist=loadfile --max-worker-restart=0

quick: $(STAMP)  ## Run the tests of the engine, the public API, plans and one Megatron model in under a minute
	@# Only files that use the marker are passed, since collecting all test files takes longer than the quick tests.
	@$(BIN)/python -m pytest -m "quick and not slow" --numprocesses=$(WORKERS) --dist=loadfile --max-worker-restart=0 \
		$$(grep -rl --include='test_*.py' 'pytest\.mark\.quick' tests)

slow: $(STAMP) versions  ## Run the slow tests: long random runs, thousands of steps, compilers, other versions
	@$(BIN)/python -m pytest -m slow --timeout=1800 --numprocesses=$(WORKERS) --dist=loadfile --max-worker-restart=0

smoke: $(STAMP)
	@$(BIN)/python -m pytest -m "not slow" --numprocesses=$(WORKERS) --dist=loadfile --max-worker-restart=0 $(SMOKE)

older:  ## Run the tests of Megatron's interface, sites and waits on Python 3.11 and megatron-core 0.16.1, in .venv-older
	@$(if $(OLDER_PYTHON),$(MAKE) VENV=.venv-older PYTHON=$(OLDER_PYTHON) smoke,echo "Skipped: Python 3.10 or 3.11 was not found.")

versions: $(STAMP)  ## Run compatibility tests on other versions of megatron-core, transformers and torch; part of `make slow`
	@.ci/versions "$(BIN)/python" "$(NEWER_TORCH)" $(SMOKE)

check: $(STAMP)  ## Check format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

package: $(BIN)/python  ## Build wheel and sdist into dist/, and test the wheel in an empty environment
	@.ci/package $(BIN)/python

pages: $(STAMP)  ## Regenerate the tables in docs/reference from the code
	@$(BIN)/python .ci/pages.py

docs: $(DOCS)/.installed  ## Build the docs site into site/; fails on broken links and stale tables
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

$(DOCS)/.installed: pyproject.toml .ci/constraints.txt | $(BIN)/python
	@$(BIN)/python -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[docs]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13) and "Python %d.%d is not supported. Pass Python 3.10 to 3.13, for example: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[megatron,test]'
	@touch $@
