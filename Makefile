# The two commands that matter: `make demo` and `make test`.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint golden benchmark

help:  ## Show what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | \
		while IFS='|' read -r target text; do printf '  make %-10s %s\n' "$$target" "$$text"; done

venv: $(INSTALLED)  ## Make $(VENV) and install memopt and its tools, if anything changed

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: venv  ## Plan Qwen3-30B-A3B, then train a tiny Qwen3-MoE with swap and with checkpointing, and prove it equal
	$(BIN)/memopt-analyze qwen3-30b-a3b --swap attention
	$(BIN)/memopt-apply tiny-qwen3-moe --swap attention
	$(BIN)/memopt-apply tiny-qwen3-moe --checkpoint selective

test: venv  ## Run all tests, lint, types and import contracts
	$(BIN)/python -m pytest -n auto --dist worksteal
	$(MAKE) lint VENV=$(VENV)

lint: venv  ## Check style, format, types and import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

golden: venv  ## Accept the reports as they are now as the golden files
	$(BIN)/python -m pytest tests/report tests/cli/test_predict.py --snapshot-update

benchmark: venv  ## Time the plan of Qwen3-30B-A3B and measure its memory
	$(BIN)/python benchmarks/analyze.py
