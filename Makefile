# Everything runs in .venv, which `make setup` creates on first use with the system's Python (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-all lint setup test-oldest figures clean

# Trains and evaluates two small models and draws them, all in runs/demo: see examples/demo.sh.
demo: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" sh examples/demo.sh

test: lint
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

# Includes the slow tests, which start many processes.
test-all: lint
	$(BIN)/pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks research
	$(BIN)/ruff format --check src tests benchmarks research
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("chiar needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	@echo "installing PyTorch, transformers and the rest into .venv: a minute or more, two gigabytes or more"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

# Runs the tests with the oldest supported transformers, in a separate environment.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	sed 's/^transformers==.*/transformers==5.17.0/' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet --constraint .venv-oldest/constraints.txt --editable ".[dev]"
	.venv-oldest/bin/pytest -n 2

# Draws docs/figures from the presets and docs/results.
figures: $(STAMP)
	$(BIN)/python -m research.figures

clean:
	rm -rf .venv .venv-oldest .pytest_cache .mypy_cache .ruff_cache .hypothesis
