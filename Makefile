# Each target does all of its own set-up: a fresh clone needs nothing but Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Real data for tests that can use it; they skip, saying so, where it is absent.
export ULTR_DATA ?= $(wildcard ../shared/data)

.PHONY: demo test test-long mutants check bench clean

demo: $(STAMP)
	$(BIN)/ultr demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# What takes too long for every change: thousands of hostile inputs, hundreds of kills, recovery over many seeds.
test-long: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long

# Small faults put into the formulas one at a time: do the tests notice?
mutants: $(STAMP)
	$(BIN)/python benchmarks/mutants.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/reading.py
	$(BIN)/python benchmarks/training.py

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
