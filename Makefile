# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each makes .venv and installs what it needs, pinned by constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
SITE := $(VENV)/.installed-docs
OLDEST := .venv-oldest
FAST := src/sparsewire tests/seams/test_faults.py $(addprefix tests/,laws codecs selectors collectives groups adapters simulation) $(filter-out tests/test_docs.py tests/test_packaging.py tests/test_benchmarks.py, $(wildcard tests/test_*.py)) tests/golden -k "not messages and not buckets"

.PHONY: demo test test-fast test-oldest lint docs linkcheck bench-wire bench-encode bench-guard bench-share bench-table2 bench-step bench-dropping bench-train bench-gpt bench-scale reproduce fuzz chaos soak wheel clean help

help:  ## what there is to make
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

# An environment in the folder $(1). Asked first, an old Python is named; pip would name a package.
define environment
test -x $(1)/bin/pip || { $(PYTHON) -c '$(check)' && $(PYTHON) -m venv $(1); }
endef
check = import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	"sparsewire needs Python 3.11 or newer, and $(PYTHON) is %d.%d: name a newer one, as in make test PYTHON=python3.12" % v[:2])

# Not quiet: pip says which requirements collide only where it says everything.
pip_install = bin/pip install --disable-pip-version-check

$(STAMP): pyproject.toml constraints.txt
	@$(call environment,$(VENV))
	$(VENV)/$(pip_install) --constraint constraints.txt --editable ".[cli]"
	@touch $@

$(DEV): $(STAMP)
	$(VENV)/$(pip_install) --constraint constraints.txt --editable ".[dev]"
	@touch $@

$(SITE): $(STAMP)
	$(VENV)/$(pip_install) --constraint constraints.txt --editable ".[docs]"
	@touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	@$(call environment,$(OLDEST))
	$(OLDEST)/$(pip_install) --constraint constraints-oldest.txt --editable ".[fast,test]"
	@touch $@

demo: $(STAMP)  ## train real MNIST on 4 hosts with 1 Gbit/s links, dense against sparse; table and plot in out/
	$(BIN)/sparsewire demo --out out/demo

test: $(DEV)  ## all tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

test-fast: $(DEV)  ## the tests that start no processes: the laws and the parts, in a few minutes
	$(BIN)/python -m pytest --numprocesses 2 --quiet $(FAST)

test-oldest: $(OLDEST)/.installed  ## the core of the tests on the oldest torch, numpy and numba that are supported
	$(OLDEST)/bin/python -m pytest --numprocesses 2 --dist loadgroup tests/selectors tests/test_functional.py tests/laws tests/distributed

lint: $(DEV)  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(SITE)  ## the site, into out/docs; warnings are errors
	$(BIN)/sphinx-build --fail-on-warning --quiet -E -b html docs out/docs

linkcheck: $(SITE)  ## whether the links to other sites lead somewhere; needs a network
	$(BIN)/sphinx-build --quiet -b linkcheck docs out/linkcheck

bench-wire: $(STAMP)  ## bits and coding time of a message, beside floors, peers and targets
	$(BIN)/python benchmarks/wire.py

bench-encode: $(STAMP)  ## what choosing and adding up cost here, beside a copy, plain torch and the floor
	$(BIN)/python benchmarks/encode.py

bench-guard: $(STAMP)  ## whether a few ratios keep to their bounds, in under a minute
	$(BIN)/python benchmarks/guard.py

bench-share: $(STAMP)  ## the share of a training step that coding takes, and how well TopK guesses
	$(BIN)/python benchmarks/share.py

bench-table2: $(STAMP)  ## what a step of ResNet-18 consists of: on one device, and on 8 hosts
	$(BIN)/python benchmarks/table2.py
	$(BIN)/sparsewire bench step --model resnet18 --hosts 8 --rates 1gbit 10gbit --batch-size 4 --rounds 2 --steps 2 --peers dense --schemes "TopK(0.01)" "RandomK(0.01, shared=False)" "RandomK(0.01)" "BlockRandomK(0.01)" "BlockRandomK(0.01, shared=True)" --out benchmarks/results/table2

bench-step: $(STAMP)  ## what a training step costs at four rates, for schemes and peers
	$(BIN)/sparsewire bench step --rates 1gbit 10gbit none --rounds 3 --peers dense fp16 bf16 powersgd-1 powersgd-4 nothing --out benchmarks/results/step
	$(BIN)/sparsewire bench step --rates 100mbit --rounds 3 --peers dense fp16 powersgd-1 --schemes "TopK(0.01)" "Scheme(TopK(0.01), values=TwoBit())" --out benchmarks/results/step-100mbit

bench-dropping: $(STAMP)  ## images per second at 90, 99 and 99.9 % dropped, against dense, at 1 Gbit/s
	$(BIN)/sparsewire bench step --rates 1gbit --peers dense --schemes "Threshold(0.1)" "Threshold(0.01)" "Threshold(0.001)" --steps 6 --out benchmarks/results/dropping

bench-train: $(STAMP)  ## how long dense and sparse training take to 97 % on MNIST at 1 Gbit/s
	$(BIN)/sparsewire bench train --schemes "TopK(0.01)" --out benchmarks/results/train

bench-gpt: $(STAMP)  ## how long a small GPT with AdamW takes to a loss of 1.9 at 100 Mbit/s, and at 50 Mbit/s
	$(BIN)/sparsewire bench train --model gpt --rate 100mbit --peers dense bf16 powersgd-4 --out benchmarks/results/gpt
	$(BIN)/sparsewire bench train --model gpt --rate 50mbit --batch-size 4 --peers dense bf16 powersgd-4 --schemes "updates Scheme(TopK(0.01), values=TwoBit())" "updates every 2 Scheme(TopK(0.05), values=TwoBit())" --target 2.1 --out benchmarks/results/gpt-50mbit

bench-scale: $(STAMP)  ## bytes and time of a step with 2 to 8 hosts, and a model of more
	$(BIN)/sparsewire bench scale --out benchmarks/results/scale

reproduce: $(STAMP)  ## train what a paper claims: STUDY="aji2017-mnist --quick"; without STUDY, list the studies
	$(BIN)/python -m papers $(STUDY)

fuzz: $(DEV)  ## ten million damaged messages and 36,000 schedules of faults: about an hour
	SPARSEWIRE_FUZZ=10000000 $(BIN)/python -m pytest --numprocesses 2 tests/test_corruption.py
	$(BIN)/python -m tests.simulation --seeds 1000 3000

chaos: $(DEV)  ## FAULTS=200 faults on real processes, drawn from SEED=1, and ten rounds of elastic training: about half an hour
	$(BIN)/python -m tests.chaos --faults $(or $(FAULTS),200) --seed $(or $(SEED),1) --out $(or $(OUT),out/chaos)
	$(BIN)/python -m tests.chaos.elastic --rounds 10 --seed $(or $(SEED),1) --out $(or $(OUT),out/chaos)

soak: $(DEV)  ## MINUTES=60 of training, and 5 of attaching and detaching: memory, descriptors and threads must be flat
	$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),60) --out $(or $(OUT),out/soak)

wheel: $(DEV)  ## build the packages for an index into dist/, and check them
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

clean:  ## remove what was made
	rm -rf $(VENV) $(OLDEST) out dist build .mypy_cache .ruff_cache .hypothesis
