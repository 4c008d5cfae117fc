# A machine needs make and Python 3.10 or later with venv. Everything else goes into .venv.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PACKAGES := kvstore launcher servers workers
SOURCES := $(PACKAGES) examples benchmarks tests

.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

$(INSTALLED): setup.cfg pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or later is needed; make PYTHON=python3.12 names another"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { echo "python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[test,bench]'
	@touch $@

install: $(INSTALLED)  ## make .venv with everything that the other commands need

DEMO := --dataset digits --batch-size 32 --num-epochs 15

demo: $(INSTALLED)  ## train a small residual network with two workers and two servers, on digits
	$(BIN)/launch.py -n 2 -s 2 --launcher local "python examples/train_cifar10.py $(DEMO)"

# Many tests wait for processes, and clusters more so: more of them at a time are faster on two cores, too.
PARALLEL := -n 4 --dist worksteal
PARALLEL_ALL := -n 6 --dist worksteal

# Compile once: tests start hundreds of processes, and PYTHONDONTWRITEBYTECODE may be set.
compiled: $(INSTALLED)
	@$(BIN)/python -m compileall -q $(SOURCES)

test: compiled  ## run the tests that need no other program; at most four minutes on two cores
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not long"

test-all: compiled  ## run all tests, on clusters made of namespaces too; at most twelve minutes
	$(BIN)/python -m pytest -q $(PARALLEL_ALL)

SEEDS ?= 0-19

# SEEDS=0-199 takes an hour or two. The tests run the first seed. KVSTORE_TESTS_LINES=1 raises at every line.
faults: $(INSTALLED)  ## cut, stop, kill and interrupt jobs by seeds, and count every update: make faults SEEDS=0-199
	PYTHONPATH=tests $(BIN)/python -m faults $(SEEDS)
	PYTHONPATH=tests $(BIN)/python -m faults $(SEEDS) --signals
	KVSTORE_TESTS_LINES=1 $(BIN)/python -m pytest -q -n 2 tests/interrupts

lint: $(INSTALLED)  ## format, lint, types and import contracts
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test-all  ## what CI runs, except the demo

# Twice the time of the tests alone: each of the processes that they start is measured, too.
coverage: $(INSTALLED)  ## run all tests and list the lines that none of them runs; fails below 90 %
	$(BIN)/coverage erase
	$(BIN)/python -m pytest -q $(PARALLEL_ALL) --cov --cov-config=setup.cfg --cov-report=term

format: $(INSTALLED)  ## let ruff format the code and repair what it can
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: $(INSTALLED)  ## measure everything beside MXNet, gloo and plain sockets; under ten minutes on two cores
	$(BIN)/python -m benchmarks all

clean:  ## remove .venv and everything that tools have left
	rm -rf $(VENV) build dist *.egg-info .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache bench-results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help install demo compiled test test-all faults lint check coverage format bench clean
