# make demo    set up, then refresh a drafter from live traffic     (ARGS="--minutes 5" goes to `draftloop demo`)
# make test    set up, then lint, type-check and test
# make lock    resolve pyproject.toml anew into requirements.lock
# Everything lands in .venv and .tools here. Needs Python 3.11 to 3.13 and a package index, nothing else.

BIN := .venv/bin
# Inside .venv, so that it goes when .venv goes.
STAMP := .venv/.setup-stamp
MEMBERS := $(wildcard packages/*/pyproject.toml services/*/pyproject.toml)

.PHONY: setup demo test lint lock clean

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.lock $(MEMBERS) tools/setup.sh tools/check_lock.py
	@sh tools/setup.sh
	@touch $@

requirements.lock:
	@echo "error: requirements.lock is missing: run 'make lock'" >&2; exit 2

demo: setup
	@$(BIN)/draftloop demo $(ARGS)

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy packages services tests/support tests/bench
	$(BIN)/pytest -n 2 --dist loadfile tests/unit tests/serving tests/cluster tests/gpu
	$(BIN)/pytest tests/loop

lint: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy packages services tests/support tests/bench

lock:
	@sh tools/setup.sh lock

clean:
	rm -rf .venv .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis
