# Each target does all of its own set-up: a fresh clone needs nothing but Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.installed-base
STAMP  := $(VENV)/.installed
# Python compiles modules when they are first imported; compiling all of them here would double the time.
PIP    := $(BIN)/pip install --disable-pip-version-check --no-compile
# Where this is set, every process compiles torch and all other packages again; the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# Real data for tests that can use it; they skip, saying so, where it is absent.
export ULTR_DATA ?= $(wildcard ../shared/data)

.PHONY: demo test test-fast test-long mutants check docs docs-serve bench clean

demo: $(BASE)
	$(BIN)/ultr demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The inner loop: no browser, no other processes, no hostile input, no examples of the documentation.
test-fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long and not slow" --hypothesis-profile=fast

# Tests that take too long for every change: thousands of hostile inputs, hundreds of kills, recovery over many seeds.
test-long: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long

# Mutation testing: put small faults into the formulas, one at a time, and check that a test fails.
mutants: $(STAMP)
	$(BIN)/python tools/mutants.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in site/. A wrong link, or a page that is not in the navigation, is an error.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet
	@echo "wrote site/: open site/index.html; for the search, run make docs-serve"

docs-serve: $(STAMP)
	$(BIN)/mkdocs serve

# Every benchmark at a small size; each has options for its full size (see the top of its file).
bench: $(STAMP)
	$(BIN)/python tools/bench.py

# The demo needs only what training needs; everything else needs the other extras too.
$(BASE): pyproject.toml
	@echo "1/2 making the virtual environment $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "2/2 installing ultr and the packages for training; torch is the largest"
	@$(PIP) --editable ".[train]"
	@touch $@

$(STAMP): $(BASE)
	@echo "installing the extras and the tools for development (some minutes)"
	@$(PIP) --quiet --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist site
