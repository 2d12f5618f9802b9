# Everything a developer runs. `make` alone prints this list.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
TESTS ?=
DEMO ?=
SEEDS ?= 20
# Not from the environment, where the name often stands for something else.
OUT := accuracy.json

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PINS := $(VENV)/constraints.txt
NIXL_PINS := $(shell sed -n '/^nixl/p' constraints.txt)
export PIP_ROOT_USER_ACTION := ignore

.PHONY: help
help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  Variables: PYTHON=$(PYTHON)  TORCH=$(TORCH)  JOBS=$(JOBS)  TESTS='-k word'  DEMO='--fault KIND'"

.PHONY: venv
venv: $(VENV)/.ready  ## Set up .venv (again only when its inputs changed)

.PHONY: demo
demo: venv  ## Record a prefill/decode pair under load, replay it, print the verdict
	@$(BIN)/replay demo $(DEMO) || test $$? -eq 1  # 1: divergent, as it should be with a fault in it

.PHONY: test
test: $(VENV)/.ready-dev sglang  ## Run the whole test suite
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(TESTS)

.PHONY: lint
lint: $(VENV)/.ready-dev  ## ruff, and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

.PHONY: types
types: $(VENV)/.ready-dev  ## mypy --strict on the three packages
	$(BIN)/mypy

.PHONY: check
check: lint types  ## lint + types

.PHONY: bench
bench: venv  ## Time the replay of 1,000,000 page snapshots against a plain comparison
	$(BIN)/python benchmarks/million_trace.py

.PHONY: accuracy
accuracy: venv  ## How often the judge is right: SEEDS=20 OUT=accuracy.json (about half an hour)
	$(BIN)/python -m benchmarks.accuracy --seeds $(SEEDS) --out $(OUT) --markdown docs/accuracy.md $(if $(KEEP),--keep $(KEEP)) $(if $(CLEAN),--clean $(CLEAN))

.PHONY: docs
docs: venv  ## Write what the documents take from code, then build the site
	$(BIN)/python docs/generate.py
	@$(MAKE) site

# -n -W: a page, link or heading that is not there, and a page that no list names, end the build.
.PHONY: site
site: $(VENV)/.ready-docs  ## Build the documents into build/site, with warnings as errors
	@$(BIN)/python -m sphinx -n -W --keep-going -q -E -c docs -d build/doctrees . build/site
	@echo "build/site/index.html"

.PHONY: notebooks
notebooks: venv  ## Run the notebooks and write them with their output and pictures
	$(BIN)/python notebooks/render.py

.PHONY: clean
clean:  ## Remove caches, build outputs and the demo's files (.venv stays)
	rm -rf build dist demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# A change of TORCH on the command line has to count as a changed input.
$(VENV)/.torch: FORCE
	@test -x $(BIN)/python || { echo "Creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

.PHONY: FORCE
FORCE:

# torch and triton are left out of the pins in force: torch is what TORCH says, and triton is what that torch brings,
# or the pinned one where it brings none (the CPU builds).
$(VENV)/.ready: pyproject.toml constraints.txt $(VENV)/.torch
	@$(BIN)/python -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make venv PYTHON=...")'
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@grep -vE '^(#|torch==|triton==)' constraints.txt > $(PINS)
	@$(PIP) install -c $(PINS) '$(TORCH)'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install -c $(PINS) "$$(grep '^triton==' constraints.txt)"
	@$(PIP) install -c $(PINS) -e .
	@$(PIP) install --no-deps $(NIXL_PINS) || \
	    echo "NIXL could not be installed here: the lab will use its TCP transport instead, and says so in the trace." >&2
	@touch $@

# SGLang stays out of site-packages: it asks for other versions of nearly everything. Each version has a folder of its
# own, and what both import is in a third; only the processes that the tests start have them on their path.
SGLANG := $(VENV)/sglang
SGLANG_VERSIONS := 0.5.23 0.5.16
SGLANG_READY := $(SGLANG)/.ready-$(firstword $(SGLANG_VERSIONS))-$(lastword $(SGLANG_VERSIONS))
SGLANG_PIP := $(PIP) install --no-deps --no-compile --target

.PHONY: sglang
sglang: $(VENV)/.ready
	@$(MAKE) $(SGLANG_READY) || \
	    echo "SGLang could not be installed here: the tests that need it are skipped, and say so." >&2

$(SGLANG_READY): tests/sglang/requirements.txt
	@echo "Installing SGLang $(SGLANG_VERSIONS) for the tests (a minute the first time)"
	@rm -rf $(SGLANG)
	@$(SGLANG_PIP) $(SGLANG)/deps -r tests/sglang/requirements.txt
	@for version in $(SGLANG_VERSIONS); do $(SGLANG_PIP) $(SGLANG)/$$version sglang==$$version; done
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@$(PIP) install -c $(PINS) -e '.[dev]'
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	@$(PIP) install -c $(PINS) -e '.[docs]'
	@touch $@
