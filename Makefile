# Everything sets itself up: the first call makes a virtual environment in .venv and installs into it, later
# calls find it ready. To use another Python: make PYTHON=python3.12 train

PYTHON ?= python3
VENV := .venv
VPYTHON := $(VENV)/bin/python
PIP_INSTALL := $(VPYTHON) -m pip install -qq --disable-pip-version-check -c requirements.txt
# pip says nothing for a minute; the dots show that something goes on.
WITH_DOTS := sh -c 'while :; do printf .; sleep 2; done & dots=$$!; "$$@"; status=$$?; kill $$dots; echo; exit $$status' dots
INSTALL_INPUTS := setup.cfg pyproject.toml requirements.txt

# More flags for the command, for example: make train ARGS="--seed=3"
ARGS ?=
# More options for pytest, for example: make test PYTEST_ARGS="tests/test_config.py -x"
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train quickstart federation audit figure1 notebooks test lint format install install-flower install-dev clean

help:
	@echo "make quickstart   a small private and robust run on synthetic data, under 30 seconds"
	@echo "make train        train CafCor under ByzLDP on MNIST (100 workers, 10 malicious)"
	@echo "make federation   a federation over a network on this machine: 10 workers, 2 malicious, MNIST"
	@echo "make audit        try to break the privacy claims (half a minute)"
	@echo "make figure1      reproduce Figure 1 of the paper with 5 seeds (over an hour; goes on where it was stopped)"
	@echo "make notebooks    execute the notebooks in full and save them with their outputs"
	@echo "make test         check style and types, then run all tests"
	@echo "make lint         check style and types only"
	@echo "make format       put the code into the house style"
	@echo "make clean        remove .venv, caches and build files; runs/ stays"
	@echo "Each sets up what it needs in .venv first. Add flags with ARGS, for example:"
	@echo "  make train ARGS=\"--seed=3\""

train: install
	@$(VPYTHON) scripts/train.py --flagfile=configs/mnist_byzldp.cfg $(ARGS)

quickstart: install
	@$(VPYTHON) scripts/train.py --flagfile=configs/quickstart.cfg $(ARGS)

federation: install-flower
	@$(VPYTHON) scripts/federation.py --flagfile=configs/federation.cfg $(ARGS)

audit: install
	@$(VPYTHON) scripts/audit.py $(ARGS)

figure1: install
	@$(VPYTHON) scripts/sweep.py --flagfile=configs/sweeps/figure1.cfg $(ARGS)
	@$(VPYTHON) scripts/plot.py --sweep_dir=runs/figure1

notebooks: install-dev
	@$(VPYTHON) scripts/notebooks.py $(ARGS)

# pytest comes last, so that its summary is the last line printed.
test: lint
	@$(VPYTHON) -m pytest -n 2 --dist=worksteal $(PYTEST_ARGS)

lint: install-dev
	@$(VPYTHON) -m ruff check --quiet .
	@$(VPYTHON) -m ruff format --check .
	@$(VPYTHON) -m mypy

format: install-dev
	@$(VPYTHON) -m ruff check --quiet --fix .
	@$(VPYTHON) -m ruff format .

install: $(VENV)/.installed

install-flower: $(VENV)/.installed-flower

install-dev: $(VENV)/.installed-dev

# pip comes last into a new environment, so an interrupted set-up is taken up again.
$(VENV)/bin/pip:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "error: $(PYTHON) was not found: install Python 3.11 or newer, or name one with make PYTHON=/path/to/python3." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: $(PYTHON) is older than Python 3.11: install a newer one, or name one with make PYTHON=/path/to/python3." >&2; exit 1; }
	@echo "Making a virtual environment in $(VENV)…"
	@"$(PYTHON)" -m venv $(VENV)

# Order-only prerequisite: pip has to be there, its date does not matter.
$(VENV)/.installed: $(INSTALL_INPUTS) | $(VENV)/bin/pip
	@echo "Setting up $(VENV) (about a minute, once)…"
	@$(WITH_DOTS) $(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-flower: $(INSTALL_INPUTS) | $(VENV)/bin/pip
	@echo "Setting up $(VENV) with Flower (about a minute, once)…"
	@$(WITH_DOTS) $(PIP_INSTALL) -e ".[flower]"
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(INSTALL_INPUTS) | $(VENV)/bin/pip
	@echo "Setting up $(VENV) with the development tools (about a minute, once)…"
	@$(WITH_DOTS) $(PIP_INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.installed $(VENV)/.installed-flower

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find cafcor_jax scripts tests -type d -name __pycache__ -prune -exec rm -rf {} +
