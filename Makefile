# `make quickstart` trains a tiny model in minutes on a CPU; `make test` runs every check.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
EXTRAS := trl,math,gym,kernels,dev

# Two torch threads on a loaded two-core machine are up to 17 times slower than one.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1

.PHONY: quickstart install test lint types layers unit slow test-vllm test-verl test-swift docs mutants clean

# Resumes a demo that was stopped; remove runs/demo to start again.
quickstart: install
	$(BIN)/dew demo

# Install torch first and alone, so that no dependency makes pip choose another build.
$(VENV)/.installed: pyproject.toml locks/core.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $$(grep '^torch==' locks/core.txt) -c locks/core.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c locks/core.txt -e ".[$(EXTRAS)]"
	touch $@

install: $(VENV)/.installed

test: lint types layers unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

layers: install
	$(BIN)/lint-imports

unit: install
	$(BIN)/pytest -n 2

slow: install
	$(BIN)/pytest -m slow

# vLLM, verl and ms-swift pin other versions of transformers and TRL, so each has its own environment. Their locks list
# every package. verl needs Python below 3.13.
$(VENV)-%/.installed: pyproject.toml locks/%.txt
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/pip install --quiet --disable-pip-version-check $$(grep '^torch==' locks/$*.txt)
	$(VENV)-$*/bin/pip install --quiet --disable-pip-version-check --no-deps -r locks/$*.txt
	$(VENV)-$*/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

test-vllm: $(VENV)-vllm/.installed
	$(VENV)-vllm/bin/pytest -m slow tests/trl/test_vllm.py
	$(VENV)-vllm/bin/pytest -m slow tests/compare/test_vllm.py

test-verl: $(VENV)-verl/.installed
	$(VENV)-verl/bin/pytest tests/verl tests/preflight/test_verl.py
	$(VENV)-verl/bin/pytest -m slow tests/verl

test-swift: $(VENV)-swift/.installed
	$(VENV)-swift/bin/pytest tests/swift

# The docs site, in build/site. Builds without a network once the environment is there.
docs: $(VENV)-docs/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build

$(VENV)-docs/.installed: locks/docs.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet --disable-pip-version-check --no-deps -r locks/docs.txt
	touch $@

mutants: install
	$(BIN)/python tests/mutants.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
