# `make demo` and `make test` need only Python >= 3.12 and pip: they build .venv from pinned constraints themselves.
PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check slow wheel clean

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	    { echo "chatreel needs Python >= 3.12, but $(PYTHON) is older: run 'make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)'"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/chatreel demo --out demo-out

test: $(VENV)/.ready
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/mypy

# What a user gets: the wheel alone, without this folder and without the development tools.
wheel: $(VENV)/.ready
	scripts/check-wheel

clean:
	rm -rf $(VENV) .venv-wheel build dist demo-out
