# `make test` on a clean clone needs Python 3.11 or newer and nothing else: it makes .venv and installs into it.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

# Asked of $(PYTHON) only when .venv is made. Each file holds the versions tested with that Python.
CONSTRAINTS = constraints/$(shell $(PYTHON) -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")').txt
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: help venv test test-servers test-sglang law campaign architecture lint types quickstart clean

help:
	@echo "make test          CPU tests (without the marks gpu, slow, servers)"
	@echo "make test-servers  real inference servers on CPU: sets them up (3 GB each), starts them, tests them (minutes)"
	@echo "make test-sglang   the SGLang part of it"
	@echo "make law           every layout against one rank: the whole table; other long tests (minutes)"
	@echo "make campaign      a run killed 40 times must end as the unbroken one (2 minutes)"
	@echo "make architecture  import rules and the table of size budgets"
	@echo "make lint          ruff"
	@echo "make types         pyright"
	@echo "make quickstart    SFT, then RL, of a small model on CPU"
	@echo "make clean         remove .venv, .venv-servers, caches and build outputs"
	@echo "Every target makes .venv first if needed, with PYTHON=$(PYTHON) (3.11 or newer)."

venv: $(INSTALLED)

# torch goes in first and alone: resolved together with the rest, another release may be fetched and then thrown away.
$(INSTALLED): setup.py $(wildcard constraints/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "megatron-klear needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
		"Name another one: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

# One thread: the tests run ranks side by side, and small operations are slower with more.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

# The servers' own environments (.venv-servers, or SERVER_ENVIRONMENTS) are made by the tests, once.
test-servers: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m servers tests/servers

test-sglang: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m servers tests/servers -k 'not vllm'

law: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m 'law or not law' tests/dist/test_layout_law.py tests/dist/test_moe_law.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m law tests --ignore tests/dist/test_layout_law.py --ignore tests/dist/test_moe_law.py

campaign: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/e2e/kill_campaign.py --kills 40

architecture: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s tests/architecture

lint: $(INSTALLED)
	$(BIN)/ruff check

types: $(INSTALLED)
	$(BIN)/pyright

quickstart: $(INSTALLED)
	$(BIN)/python examples/quickstart/run.py

clean:
	rm -rf .venv .venv-servers build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
