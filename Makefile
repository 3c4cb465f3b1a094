# make demo | test | lint: each creates .venv and installs into it first (only when pyproject.toml or constraints.txt changed).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := mdlm/*.py samplers training eval benchmarks docs/studies tests notebooks

.PHONY: help install demo browser test test-slow lint format notebooks clean

help:
	@echo "make demo       install, fine-tune the built-in model on FOLDER (default: the sources of mdlm), loss and samples before"
	@echo "                and after, the text unmasking (about 5 minutes)"
	@echo "make test       install (Chromium as well where apt-get can), run the test suite"
	@echo "make test-slow  the extras behind the marker 'slow'"
	@echo "make lint       install, ruff and mypy"
	@echo "make notebooks  install, run the notebooks and render them into docs/notebooks (some minutes)"
	@echo "make clean      remove .venv and the demo's output"

$(STAMP): pyproject.toml constraints.txt
	@echo "== creating $(VENV) and installing (a few minutes the first time)"
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), f"Python 3.10 or newer is needed, this is {sys.version}"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

install: $(STAMP)

demo: $(STAMP)
	@echo "== demo: fine-tune the built-in model"
	$(BIN)/mdlm demo $(if $(FOLDER),--folder "$(FOLDER)")

# Chromium for the tests of pages, from Debian; without it, or without the right to install, those tests are skipped.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v $$name > /dev/null && exit 0; done; \
	echo "== installing chromium"; \
	{ apt-get install -y --no-install-recommends chromium fonts-dejavu-core || \
	  { apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; }; } > /dev/null 2>&1 || \
	echo "chromium cannot be installed here: tests marked 'browser' will be skipped"

test: $(STAMP) browser
	@echo "== tests, two at a time"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: $(STAMP)
	@echo "== slow extras"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

lint: $(STAMP)
	@echo "== ruff and mypy"
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

notebooks: $(STAMP) browser
	@echo "== running and rendering the notebooks"
	$(BIN)/python notebooks/render.py

clean:
	rm -rf $(VENV) demo
