# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each makes .venv and installs what it needs, pinned by constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench bench-wire wheel clean help

help:  ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(STAMP)  ## train real MNIST on 4 worker processes, dense against sparse; table and plot in out/
	$(BIN)/sparsewire compare mnist --workers 4 --out out/demo

test: $(STAMP)  ## all tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

lint: $(STAMP)  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)  ## what the stages of one exchange cost here, as multiples of a copy
	$(BIN)/python benchmarks/exchange.py

bench-wire: $(STAMP)  ## bits and coding time of a message, beside floors, peers and targets
	$(BIN)/python benchmarks/wire.py

wheel: $(STAMP)  ## build the wheel into dist/
	$(BIN)/python -m build --wheel

clean:  ## remove what was made
	rm -rf $(VENV) out dist build .mypy_cache .ruff_cache .hypothesis
