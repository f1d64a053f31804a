# Needs make, g++ and Python 3.11 or newer with venv and headers; everything else goes into .venv.
PYTHON ?= python3
PY ?= .venv/bin/python
OUT ?= out
STAMP := .venv/.installed
ROOMS := schemas runtime operator_templates dedup verification training_export kernel_agent pipelines
CODE := $(ROOMS) benchmarks tests
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help ops6k install lint test test-slow test-gpu clean

help:
	@echo "make ops6k      install, then make a small dataset in $(OUT)/ (ARGS='--num_problems=200' for more)"
	@echo "make test       ruff, mypy and the fast tests (minutes)"
	@echo "make test-slow  the tests that kill runs and rebuild everything"
	@echo "make test-gpu   the tests that need a GPU; PY=python3 uses that interpreter as it is"

ops6k: $(STAMP)
	$(PY) -m pipelines.ops6k --output=$(OUT) $(ARGS)

install: $(STAMP)

# The stamp is newer than the lock file exactly when the lock file is installed.
$(STAMP): requirements.lock
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, \
	$(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q -r requirements.lock
	@touch $@

lint: $(STAMP)
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	$(PY) -m mypy $(CODE)

test: lint
	$(PY) -m pytest -m "not slow and not gpu"

test-slow: $(STAMP)
	$(PY) -m pytest -m "slow and not gpu"

test-gpu:
	$(PY) -m pytest -m gpu

clean:
	rm -rf .venv out build .mypy_cache .ruff_cache .pytest_cache
