# make run   installs into .venv if needed, then has the default model write under a small budget
# make test  runs the tests;  make lint  checks style and types;  make clean  removes .venv

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PROMPT ?= In two sentences: why is the sky blue?

.PHONY: run test lint clean
.DELETE_ON_ERROR:

run: $(STAMP)
	$(BIN)/shadowlane run smollm2 --ram 64MiB --max-tokens 96 -p "$(PROMPT)"

# Two test runners side by side, files in the order of their folders: the longest begin. Clusters of
# Ray use all cores, have to notice a death within seconds, and so come afterwards.
test: $(STAMP)
	$(BIN)/python -m pytest -q -m "not ray" -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -q -m ray

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Made again only when what is to be installed has changed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/shadowlane.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
