# Each target does all of its own set-up: a fresh clone needs nothing but Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.installed-base
# .venv/.installed-NAME: the dependency group NAME of pyproject.toml is installed.
GROUP  := $(VENV)/.installed-
# The versions that were tested; with `make CONSTRAINTS=` the newest ones are installed.
CONSTRAINTS ?= constraints.txt
# Python compiles modules when they are first imported; compiling all of them here would double the time.
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
PIP    += $(addprefix --constraint ,$(CONSTRAINTS))
# Where this is set, every process compiles torch and all other packages again; the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# Real data for tests that can use it; they skip, saying so, where it is absent.
export ULTR_DATA ?= $(wildcard ../shared/data)

.PHONY: demo test test-fast test-long mutants check docs docs-serve bench clean

demo: $(BASE)
	$(BIN)/ultr demo

test: $(GROUP)test
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The inner loop: no browser, no other processes, no hostile input, no examples of the documentation.
test-fast: $(GROUP)test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long and not slow" --hypothesis-profile=fast

# Tests that take too long for every change: thousands of hostile inputs, hundreds of kills, recovery over many seeds.
# It also installs Spark and MLflow, for their tests.
test-long: $(GROUP)long
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long

# Mutation testing: put small faults into the formulas, one at a time, and check that a test fails.
mutants: $(GROUP)test
	$(BIN)/python tools/mutants.py

check: $(GROUP)dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in site/. A wrong link, or a page that is not in the navigation, is an error.
docs: $(GROUP)docs
	$(BIN)/mkdocs build --strict --quiet
	@echo "wrote site/: open site/index.html; for the search, run make docs-serve"

docs-serve: $(GROUP)docs
	$(BIN)/mkdocs serve

# Every benchmark at a small size; each has options for its full size (see the top of its file).
bench: $(GROUP)test
	$(BIN)/python tools/bench.py

# The demo needs only what training needs. Older versions of pip do not know dependency groups.
$(BASE): pyproject.toml $(CONSTRAINTS)
	@echo "1/2 making the virtual environment $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	@echo "2/2 installing ultr and the packages for training; torch is the largest"
	@$(PIP) --editable ".[train]"
	@touch $@

$(GROUP)%: $(BASE)
	@echo "installing the dependency group $* (some minutes)"
	@$(PIP) --quiet --editable . --group $*
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist site
