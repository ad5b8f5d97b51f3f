# `make train` and `make test` set up what they need in .venv, from constraints.txt, and are quick the second time.

PYTHON ?= $(firstword $(foreach python,python3.12 python3.11 python3,$(shell $(python) -c \
	'import sys; print("$(python)" if (3, 11) <= sys.version_info[:2] <= (3, 12) else "")' 2>/dev/null)))
BIN := .venv/bin
# Compiled by all cores at once, which pip does file by file as it installs; but for what is used little or not at all.
INSTALL = PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	--constraint constraints.txt
RARE = transformers|tests|testing|_inductor|onnx|ao|pip|setuptools|mypyc?|selenium|fontTools|networkx|huggingface_hub
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/($(RARE))/' $$($(BIN)/python -c \
	'import sysconfig; print(sysconfig.get_path("purelib"))') || true

# Each begins with a quarter and in the end takes from the others': neighbours share processes, pages and runs. Four on
# two cores, as tests wait half of their time. Modules are kept compiled, as hundreds of processes import them.
AT_ONCE := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses 4 --dist worksteal

.PHONY: help train test test-all test-worlds test-gpu check docs clean

help:  ## show this
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/  make \1\t\2/p' Makefile | expand -t 22

train: .venv/installed-text  ## train a small GPT on this machine's own Python source
	$(BIN)/paceline train --workers 2

test: .venv/installed-dev  ## run the tests, of many cases alike one each: a few minutes
	$(AT_ONCE)

test-all: .venv/installed-dev  ## run every case of every test
	$(AT_ONCE) -m ''

test-worlds: .venv/installed-dev  ## run the engine's cases among all numbers of ranks and groups
	$(AT_ONCE) -m other_worlds

# With the torch of a machine that has GPUs: nothing is installed, only pytest must be there.
test-gpu:  ## run what only a GPU can show, with $(PYTHON)'s own torch
	$(PYTHON) -m pytest tests/gpu -m gpu -ra --confcutdir tests/gpu

check: .venv/installed-dev  ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# All pages anew, as what is wrong with a page is told only when it is read.
docs: .venv/installed-docs  ## build the guide and the reference as a site: build/docs/index.html
	$(BIN)/python -m sphinx -q -E -W --keep-going docs build/docs

# Python 3.11's own pip takes twice as long to find the same.
.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "paceline needs Python 3.11 or 3.12; name one with: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip

.venv/installed-text: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable '.[text,plot]'
	$(COMPILE)
	@touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable '.[dev]'
	$(COMPILE)
	@touch $@ .venv/installed-text

.venv/installed-docs: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) --editable '.[text,docs]'
	@touch $@

clean:  ## remove .venv and what tools left
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
