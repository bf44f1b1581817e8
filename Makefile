# Two commands: `make train` runs the embedded default, `make test` checks everything. Both set up .venv themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install train test quick lint types imports pytest clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

train: install
	$(BIN)/python train.py $(ARGS)

test: lint types imports pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

pytest: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slurm # one after the other: each job takes both cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slurm"

quick: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

clean:
	rm -rf $(VENV) outputs multirun .mypy_cache .pytest_cache .ruff_cache
