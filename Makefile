# Every target makes .venv by itself: once, and again when the pins in requirements/ change.
# DEVICE=cpu|cuda and PYTHON=python3.11 override what tools/setup_venv.sh finds.
PYTEST := .venv/bin/python -m pytest tests

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-system lint clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## make .venv with the pinned packages
	@bash tools/setup_venv.sh

demo: setup  ## teach a small model arithmetic with GRPO; results in runs/demo
	@PATH="$(CURDIR)/.venv/bin:$$PATH" bash launch/demo.sh

test: setup  ## the tests that need neither a GPU nor much time
	@$(PYTEST) -m "not slow and not gpu and not system"

test-slow: setup  ## the slow tests
	@$(PYTEST) -m slow

test-system: setup  ## whole runs from the command line
	@$(PYTEST) -m system

lint: setup  ## ruff and basedpyright
	@.venv/bin/ruff check .
	@.venv/bin/basedpyright

clean:  ## remove build outputs and caches; .venv and runs/ stay
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
