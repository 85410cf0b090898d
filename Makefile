# `make demo` and `make test` are all that a newcomer needs; both install first when they must.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := profiler,plot,dev
# Steps of the training that `make demo` plans, and further arguments for pytest.
STEPS ?= 20000
ARGS ?=
# Processes that share the tests' files; a file stays in one of them, with the compile cache it fills.
WORKERS ?= 2

# What checks a claim; the other scripts of bench/ make the corpus, or are parts of these.
BENCHES := startup flip buckets rpc prior overhead repeat truth handover mends shapes regret autocompile distributed scaling

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Another installation of the caller's must not be imported instead of this one.
unexport PYTHONPATH PYTHONHOME

# The warning that is ignored tells not to delete build/, on each install.
PIP := PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation
EDITABLE := --config-settings editable_mode=strict --editable

.PHONY: help install demo test lint types protos bench clean FORCE

help: ## list these targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

install: $(VENV)/.linked ## create .venv and install the advisor into it

demo: install ## measure examples/ner_bert.py and print the verdict (under 5 minutes)
	@$(BIN)/advise run examples/ner_bert.py:build --steps $(STEPS) --budget 4m

test: install ## run the tests that need no GPU (ARGS="-k name" for some of them)
	@# Torch's threads of several processes would wait for each other's cores, spinning.
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu" -n $(WORKERS) --dist loadfile $(ARGS)

lint: install ## check style (ruff) and the direction of imports (import-linter)
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "not formatted: run $(BIN)/ruff format"; exit 1; }
	@# Run from build/: in the root, the folder advisor/ would hide the installed package.
	@cd build && ../$(BIN)/lint-imports --no-logo --cache-dir ../.import_linter_cache ../pyproject.toml \
		> lint-imports.log 2>&1 || { cat lint-imports.log; exit 1; }
	@echo "lint: clean"

types: install ## check types (mypy --strict)
	@# The files that mypy is given are links in the installed package; the names printed are the sources.
	@farm=$$(echo build/__editable__.compile_advisor-*/advisor); \
		$(BIN)/mypy "$$farm" | sed -E "s#^$$farm/(models|profiler)/#\1/#; s#^$$farm/#advisor/#"

protos: install ## generate advisor/v1/ from protos/advisor/v1/*.proto
	@sh protos/generate.sh

bench: install ## run the benchmarks in bench/ (two hours, alone on the machine)
	@for name in $(BENCHES); do echo "== $$name"; $(BIN)/python "bench/$$name.py"; done

clean: ## remove everything that the other targets made
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version): make PYTHON=python3.12 ..."; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PIP) setuptools
	@$(PIP) $(EDITABLE) '.[$(EXTRAS)]'
	@touch $@

# The strict editable install is a tree of links to the sources: edits show at once, but a file that
# was added or taken away needs the tree to be made anew, which takes two seconds.
$(VENV)/.linked: $(VENV)/.installed $(VENV)/.sources
	@find build -xtype l -delete
	@$(PIP) --no-deps $(EDITABLE) .
	@touch $@

# Rewritten only when the list has changed.
$(VENV)/.sources: FORCE | $(VENV)/.installed
	@find advisor models profiler -type f -not -path '*/__pycache__/*' | LC_ALL=C sort > $@.new
	@if cmp -s $@ $@.new; then rm $@.new; else mv $@.new $@; fi
