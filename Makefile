# A machine needs make and Python 3.10 or later with venv. Everything else goes into .venv.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
EXTRA := $(VENV)/.extra
PACKAGES := kvstore launcher servers workers
SOURCES := $(PACKAGES) examples benchmarks docs tests

# Compiled modules are kept: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# One pip at a time.
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or later is needed; make PYTHON=python3.12 names another"; exit 1; }
	@echo "making $(VENV), the environment for everything here"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

# What setup.cfg lists for an extra, without versions; the first time, what every installation needs, too.
LISTED = $(if $(wildcard $(EXTRA)-*),,c["options"]["install_requires"] + )c["options.extras_require"]["$*"]
NAMES = $(PYTHON) -c 'import configparser, re; c = configparser.ConfigParser(); c.read("setup.cfg"); \
  print(*re.findall(r"^[\w-]+", $(LISTED), re.M), sep=", ")'

# An extra of setup.cfg; a file in .venv says that it is installed. Nothing is compiled: all of torch would take longer
# than the rest together, and Python compiles what it imports.
# The project was called kvstore before: what is left under that name would be a second owner of launch.py.
$(EXTRA)-%: setup.cfg pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	@rm -rf kvstore.egg-info
	@! ls -d $(VENV)/lib/python3*/site-packages/kvstore-*.dist-info >/dev/null 2>&1 || \
	  $(BIN)/pip uninstall --quiet --yes kvstore
	@echo "installing $$($(NAMES)) into $(VENV) (once; less than a minute, and the time to download them)"
	@tools/install.sh $(VENV) -c $(CONSTRAINTS) -e '.[$*]'
	@touch $@

install: $(EXTRA)-examples $(EXTRA)-test $(EXTRA)-dev $(EXTRA)-release $(EXTRA)-plot $(EXTRA)-docs $(EXTRA)-torchrl  ## make .venv with everything that the other commands need

DEMO := --dataset digits --batch-size 16 --num-epochs 6

demo: $(EXTRA)-examples  ## train a small residual network with two workers and two servers, on digits
	$(BIN)/launch.py -n 2 -s 2 --launcher local --show 0 "python examples/train_cifar10.py $(DEMO)"

EPOCHS := 4

demo-faults: $(EXTRA)-examples $(EXTRA)-test  ## the demo, undisturbed and with a server killed every other second: both must end with the same bits
	mkdir -p build/demo
	OMP_NUM_THREADS=1 $(BIN)/launch.py -n 2 -s 2 "python examples/train_cifar10.py \
	  --dataset digits --batch-size 16 --num-epochs $(EPOCHS) --model-prefix build/demo/undisturbed"
	PYTHONPATH=tests $(BIN)/python -m faults.demo build/demo/undisturbed --epochs $(EPOCHS)

# Many tests wait for processes, and clusters more so: more of them at a time are faster on two cores, too.
# tests/forked.py collects them once for all.
PARALLEL := --processes 4
PARALLEL_ALL := --processes 6

# pytest compiles the assertions of all tests, once, in 25 s. In a fresh clone two processes do so.
COMPILED := tests/__pycache__/test_docs.cpython-*-pytest-*.pyc
COMPILE = @ls $(COMPILED) >/dev/null 2>&1 || printf '%s\n' 'tests/kvstore' 'tests --ignore=tests/kvstore' | \
  xargs -P 2 -L 1 $(BIN)/python -m pytest -q -p no:cacheprovider --collect-only >/dev/null || true

test: $(EXTRA)-test  ## run the tests that need no other program; some three minutes on two cores
	$(COMPILE)
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not long and not release and not faults"

# Every process that imports torch costs one to two seconds, and a real job has five. So CI has one of each kind of them.
test-ci: $(EXTRA)-test $(EXTRA)-dev $(EXTRA)-release  ## run all tests but those of a kind that is there already; on clusters made of namespaces too; some six minutes
	$(COMPILE)
	$(BIN)/python -m pytest -q $(PARALLEL_ALL) -m "not release and not faults" --defaults each

# Importing torchrl takes seconds: no other command runs the tests with it.
test-all: $(EXTRA)-test $(EXTRA)-dev $(EXTRA)-release $(EXTRA)-torchrl  ## run all tests but those of make faults; before a release; some 17 minutes
	$(COMPILE)
	$(BIN)/python -m pytest -q $(PARALLEL_ALL) -m "not faults" --hypothesis-profile thorough

# The suites of what programs call, while torch or numpy has other global defaults than the usual ones: see tests/defaults.py.
PUBLIC := tests/kvstore/store tests/workers
UNDER = $(BIN)/python -m pytest -q $(PARALLEL_ALL) -m "not long and not release and not faults"

test-each-default: $(EXTRA)-test  ## run these suites under each of the defaults; half an hour
	$(COMPILE)
	for name in float64 bfloat16 float16 device numpy deterministic anomaly; do \
	  echo "$$name" && $(UNDER) --defaults $$name $(PUBLIC) || exit 1; done
	for name in inference no_grad; do echo "$$name" && $(UNDER) --defaults $$name tests/kvstore/store || exit 1; done

SEEDS ?= 0-19

# SEEDS=0-199 takes an hour or two. The tests run the first seed. KVSTORE_TESTS_LINES=1 raises at every line.
faults: $(EXTRA)-test  ## cut, stop, kill and interrupt jobs by seeds, and count every update: make faults SEEDS=0-199
	PYTHONPATH=tests $(BIN)/python -m faults $(SEEDS)
	PYTHONPATH=tests $(BIN)/python -m faults $(SEEDS) --signals
	PYTHONPATH=tests $(BIN)/python -m simulation $(SEEDS)
	PYTHONPATH=tests $(BIN)/python -m simulation 0 --crashes
	PYTHONPATH=tests $(BIN)/python -m simulation $(SEEDS) --replicas
	PYTHONPATH=tests $(BIN)/python -m simulation 0 --crashes --replicas
	PYTHONPATH=tests $(BIN)/python -m simulation $(SEEDS) --losses
	PYTHONPATH=tests $(BIN)/python -m simulation 0 --crashes --losses
	PYTHONPATH=tests $(BIN)/python -m simulation 0 --crashes --losses --replicas
	PYTHONPATH=tests $(BIN)/python -m faults 0 --kills 40
	PYTHONPATH=tests $(BIN)/python -m faults.losing 0-7
	PYTHONPATH=tests $(BIN)/python -m faults.losing 0-3 --modes sync --phases
	PYTHONPATH=tests $(BIN)/python -m faults.losing 0-3 --return
	PYTHONPATH=tests $(BIN)/python -m faults 0 --kills 8 --launch --kinds unix,shm,tcp,zeromq --modes sync
	PYTHONPATH=tests $(BIN)/python -m faults 0 --kills 8 --move --launch --kinds shm --modes sync,rows
	$(MAKE) demo-faults EPOCHS=40
	PYTHONPATH=tests $(BIN)/python -m faults.checkpoints 200
	KVSTORE_TESTS_LINES=1 $(BIN)/python -m pytest -q --processes 2 tests/interrupts
	$(BIN)/python -m pytest -q -m faults

lint: $(EXTRA)-dev  ## format, lint, types and import contracts
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/hadolint --failure-threshold style Dockerfile
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(EXTRA)-docs  ## build the site into build/site, with the API reference; every warning is an error
	$(BIN)/python docs/build.py

compiled: $(EXTRA)-test
	$(COMPILE)

# Not beside the tests, which keep two cores busy: run together, both took as long.
check: $(EXTRA)-dev $(EXTRA)-docs $(EXTRA)-test  ## what CI runs, except the demo
	printf '%s\n' lint docs compiled | xargs -P 2 -n 1 $(MAKE) --no-print-directory
	$(MAKE) --no-print-directory test-ci

# Twice the time of the tests alone: each of the processes that they start is measured, too.
coverage: $(EXTRA)-test $(EXTRA)-dev  ## run all tests and list the lines that none of them runs; fails below 90 %
	$(BIN)/coverage erase
	$(BIN)/python -m pytest -q -n 5 --dist worksteal -m "not faults" --cov --cov-config=setup.cfg --cov-report=term-missing:skip-covered

format: $(EXTRA)-dev  ## let ruff format the code and repair what it can
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: $(EXTRA)-examples $(EXTRA)-plot  ## measure everything beside MXNet, gloo and plain sockets; under ten minutes on two cores
	$(BIN)/python -m benchmarks all

# LINKS=URL makes the relative links of README whole, for PyPI.
dist: $(EXTRA)-release  ## make the sdist and the wheel from the tracked files; the same files give the same bytes
	rm -rf dist
	tools/dist.sh dist $(BIN)/python
	$(BIN)/twine check --strict dist/*
	cd dist && sha256sum *

clean:  ## remove .venv and everything that tools have left
	rm -rf $(VENV) build dist *.egg-info .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache bench-results .cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: compiled help install demo demo-faults test test-ci test-all test-each-default faults lint docs check coverage format bench dist clean
