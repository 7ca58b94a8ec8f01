# make quickstart   sets up .venv and runs the first training
# make test         sets up .venv and runs the tests; make test-long and make test-cluster the ones that take many minutes
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup quickstart test test-long test-cluster unit lint format clean

setup: $(VENV)/.dev

$(VENV)/.base: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' \
		|| { echo "error: Rollstream needs Python 3.11 or newer, found '$(PYTHON)'; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing Rollstream and PyTorch into $(VENV): about 1.8 GB, a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "Installing the tools for tests into $(VENV)"
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

quickstart: $(VENV)/.base
	$(BIN)/rollstream train quickstart name=quickstart-$$(date +%Y%m%d-%H%M%S)

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-long: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m long

test-cluster: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -m cluster

unit: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile tests/unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info
