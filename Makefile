# `make train` and `make test` set up what they need in .venv, from constraints.txt, and are quick the second time.

PYTHON ?= $(firstword $(foreach python,python3.12 python3.11 python3,$(shell $(python) -c \
	'import sys; print("$(python)" if (3, 11) <= sys.version_info[:2] <= (3, 12) else "")' 2>/dev/null)))
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test test-worlds check clean

train: .venv/installed-text  ## train a small GPT on this machine's own Python source
	$(BIN)/paceline train --workers 2

test: .venv/installed-dev  ## run the whole test suite
	$(BIN)/python -m pytest

test-worlds: .venv/installed-dev  ## run the engine's cases among all numbers of ranks and groups that `make test` leaves out
	$(BIN)/python -m pytest -m other_worlds

check: .venv/installed-dev  ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "paceline needs Python 3.11 or 3.12; name one with: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed-text: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable '.[text]'
	@touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable '.[dev]'
	@touch $@ .venv/installed-text

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
