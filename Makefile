# Everything runs in .venv, which the targets make themselves. A stamp in it remembers which requirements
# it was filled from, so that nothing is installed, prepared or trained twice.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PY := $(VENV)/bin/python
READER := $(VENV)/.reader
DEVELOPER := $(VENV)/.developer

# How long threads spin while they wait: see mdsd/__init__.py. Here for the notebooks, which import torch first.
export GOMP_SPINCOUNT ?= 1000

DATA := prepared/little-world
RUN := runs/quickstart

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart lab book test check bench hooks clean

help:
	@echo "make quickstart   install, prepare the corpus, train the tiny model, print three stories"
	@echo "make lab          open the chapters in JupyterLab"
	@echo "make book         build the book: book/_build/html/index.html"
	@echo "make test         run the tests and every chapter, comparing the chapters' outputs"
	@echo "make check        lint, check types, compare the package with its notebooks"
	@echo "make bench        measure speed and memory beside transformers and a dense GPT: bench.json"
	@echo "make clean        remove what was built (.venv, data sets and trained models stay)"
	@echo
	@echo "PYTHON=python3.12 chooses the interpreter, VENV=folder the environment, JOBS=n the test processes."

$(READER): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("mdsd needs Python 3.11 or newer and found %d.%d. Try: make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt -e .
	@touch $@

$(DEVELOPER): requirements-dev.txt $(READER)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

$(DATA)/meta.json: | $(READER)
	$(PY) -m mdsd prepare --source bundled --level easy --out $(DATA)

# The loss curve is written last; a run without one was interrupted and goes on from its last checkpoint.
$(RUN)/loss.png: | $(DATA)/meta.json
	$(PY) -m mdsd train --data $(DATA) --preset tiny --out $(RUN) $(if $(wildcard $(RUN)),--resume)

quickstart: $(READER) $(RUN)/loss.png
	$(PY) -m mdsd evaluate --run $(RUN)

lab: $(READER)
	$(PY) -m jupyterlab chapters

book: $(READER)
	$(VENV)/bin/jupyter-book build book --warningiserror --nitpick --keep-going

test: $(DEVELOPER)
	OMP_NUM_THREADS=1 $(PY) -m pytest --nbval -n $(JOBS)

check: $(DEVELOPER)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/test_chapters.py

bench: $(DEVELOPER)
	$(PY) -m mdsd bench --out bench.json

hooks: $(DEVELOPER)
	$(PY) -m pre_commit install

clean:
	rm -rf book/_build book/chapters build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find chapters mdsd tests -name __pycache__ -prune -exec rm -rf {} +
