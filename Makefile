# The project's commands; each makes .venv first, once, from the pins in constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STUDY ?= a9a_5
ARGS ?=

.PHONY: tune ui test test-all check format clean

tune: $(VENV)/.installed
	$(BIN)/python -m fedlightning.tune --study $(STUDY) $(if $(TRIALS),--trials $(TRIALS)) $(ARGS)

ui: $(VENV)/.installed
	$(BIN)/python -m fedlightning.ui $(ARGS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m "not slow" $(ARGS)

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m slow $(ARGS)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,ray]'
	@touch $@
