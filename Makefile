# `make setup` once; every other target runs it when pyproject.toml or constraints.txt have changed.
#   PYTHON=python3.12   the interpreter to use (3.11 or newer; found by itself when not given)
#   TORCH_INDEX=URL     a package index with CPU builds of torch, much smaller than the default ones
#   ARGS="-k room"      more arguments for pytest or kvflow
VENV ?= .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.setup-done
CODE := kvflow tests $(wildcard examples)
ARGS ?=
export PYTHON TORCH_INDEX

.PHONY: setup demo test prove mutants check lint types bench gpu clean

setup: $(DONE)

$(DONE): pyproject.toml constraints.txt .ci/setup
	.ci/setup $(VENV)
	touch $@

demo: setup
	$(BIN)/kvflow demo $(ARGS)

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

prove: setup
	$(BIN)/kvflow sim --plant all $(ARGS)

mutants: setup
	$(BIN)/python -m tests.proof.mutants $(ARGS)

check: lint types
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/house/test_sizes.py tests/house/test_floors.py

lint: setup
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/kvflow bench transfer $(ARGS)
	$(BIN)/kvflow bench rooms $(ARGS)

gpu: setup
	$(BIN)/python -m pytest -m gpu $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find kvflow tests -name __pycache__ -type d -prune -exec rm -rf {} +
