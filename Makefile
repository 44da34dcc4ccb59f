# Two commands set everything up on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Which build of the native library: mooncake-cpu, mooncake (CUDA 12) or mooncake-cuda13.
MOONCAKE ?= mooncake-cpu
# PyTorch for the model tests, as arguments of pip. PyPI's build for x86 has CUDA in it, gigabytes that these tests do not
# use; "torch --index-url https://download.pytorch.org/whl/cpu" gets the small one where that can be reached.
TORCH ?= torch==2.13.0
# Processes that `make test` shares the test files among; most of them wait for Mooncake. 0: this one alone, as for --pdb.
WORKERS ?= 2
ARGS ?=

.PHONY: help demo serve test test-jobs test-models test-faults soak lint format install browser system clean

help:
	@echo "make demo   replay a small workload on a local Mooncake (ARGS='--help' for more)"
	@echo "make serve  run a local Mooncake to develop against"
	@echo "make test   run the tests"
	@echo "make test-jobs  whole offline jobs: killed, shared out, on Ray (installs Ray, and Chromium where apt-get can)"
	@echo "make test-models  real attention, stored and restored (installs PyTorch and transformers)"
	@echo "make test-faults  kill, stop and damage a Mooncake under the client (ten minutes)"
	@echo "make soak   random faults under load, ten minutes (ARGS='--minutes 1' for fewer)"
	@echo "make lint   check style and types"
	@echo "make format lay the code out"

demo: install
	$(RUN) -m mooncake_sparse_client demo $(ARGS)

serve: install
	$(RUN) -m mooncake_sparse_client serve $(ARGS)

test: install
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-jobs: $(VENV)/jobs-installed | browser
	$(RUN) -m pytest -m jobs $(ARGS)

test-models: $(VENV)/models-installed
	$(RUN) -m pytest -m models $(ARGS)

test-faults: install
	$(RUN) -m pytest -m faults $(ARGS)

soak: install
	$(RUN) tests/faults/soak.py $(ARGS)

lint: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: install
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml | system
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is %s; set PYTHON=" % sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[$(MOONCAKE),dev]'
	touch $@

$(VENV)/models-installed: $(VENV)/installed
	$(VENV)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[$(MOONCAKE),dev,transformers]'
	touch $@

$(VENV)/jobs-installed: $(VENV)/installed
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[$(MOONCAKE),dev,ray]'
	touch $@

# A test looks at a report in a browser. Without one it is skipped.
browser:
	@for name in chromium chromium-browser google-chrome; do ! command -v $$name >/dev/null || exit 0; done; \
	as_root=; [ "$$(id -u)" = 0 ] || as_root=sudo; \
	echo "installing chromium"; \
	{ $$as_root apt-get update -qq && \
	  $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >/dev/null || \
	echo "no chromium: the test that wants it is skipped"

# What the native wheel links to, and what Debian leaves out of Python; installed only where missing.
system:
	@missing=; \
	for library in libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4; do \
	  PATH="$$PATH:/sbin:/usr/sbin" ldconfig -p | grep -q "$${library%%:*}" || missing="$$missing $${library##*:}"; \
	done; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3 python3-venv"; \
	if [ -n "$$missing" ]; then \
	  as_root=; [ "$$(id -u)" = 0 ] || as_root=sudo; \
	  echo "installing$$missing"; \
	  $$as_root apt-get update -qq && $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	fi

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
