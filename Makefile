# Every target sets up what it needs, on a machine that has only Python (3.10 or later) and make.
# The set-up is tools/setup.py: it looks first, so a second run costs a fraction of a second.

PYTHON ?= python3
ARGS   ?=
HOURS  ?= 1
JOBS   ?= 4

# Outside parts that tests and benchmarks use where they can be had (extras of pyproject.toml; Debian packages).
# Without one, its tests are skipped and the run says so. `make test WANT= DEBIAN=` tries none of them.
WANT   ?= interop deploy bench pyspy
DEBIAN ?= redis-server iproute2 etcd-server chromium chromium-driver

QUICK  := tests/core tests/histories tests/test_tidy.py tests/test_errors.py tests/test_deadline.py tests/test_text.py

BIN   := .venv/bin
SETUP := $(PYTHON) tools/setup.py
LINT  := $(BIN)/ruff check . || failed="$$failed ruff-check"; \
         $(BIN)/ruff format --check . || failed="$$failed ruff-format"; \
         $(BIN)/mypy || failed="$$failed mypy"
# Ends a recipe: says once more what was missing, then what failed.
CLOSE  = cat .venv/missing.txt; [ -z "$$failed" ] || { echo "make $@: FAILED:$$failed"; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help run test quick matrix soak bench docs frameworks lint clean

help: ## say what the targets do
	@echo "make TARGET [PYTHON=python3] [ARGS='…']"
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' $(MAKEFILE_LIST)

run: ## launch four workers, one of which is killed half-way, and see them recover (ARGS go to examples/pi.py)
	@$(SETUP) --need all
	$(BIN)/rallypoint run --nproc-per-node 4 --max-restarts 3 examples/pi.py --kill-half-way $(ARGS)

test: ## lint, check types and run every test, JOBS files at a time (ARGS go to pytest)
	@$(SETUP) --need all dev docs --want $(WANT) --want-debian $(DEBIAN) --label "NOT TESTED"
	@failed=; $(LINT); \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS) || failed="$$failed pytest"; \
	$(CLOSE)

quick: ## what answers within half a minute: lint, the pure core, histories, the rules of the tree
	@$(SETUP) --need all dev
	@failed=; $(BIN)/ruff check . || failed=" ruff-check"; $(BIN)/ruff format --check . || failed="$$failed ruff-format"; \
	$(BIN)/python -m pytest -q -n 2 --dist worksteal $(QUICK) $(ARGS) || failed="$$failed pytest"; \
	$(CLOSE)

matrix: ## make quick's tests on every Python from 3.10 to 3.14 that is on this machine, and with the oldest dependencies (ARGS go to pytest)
	@$(PYTHON) tools/matrix.py $(QUICK) -- $(ARGS)

soak: ## run the seeded tests with fresh seeds for HOURS (ARGS go to tools/soak.py)
	@$(SETUP) --need all dev
	@$(BIN)/python tools/soak.py --hours $(HOURS) $(ARGS)

bench: ## measure side by side with the peers (ARGS go to benchmarks)
	@$(SETUP) --need all bench --want $(WANT) --want-debian $(DEBIAN) --label "NOT MEASURED"
	@failed=; $(BIN)/python -m benchmarks $(ARGS) || failed=" benchmarks"; \
	$(CLOSE)

docs: ## build the site into dist/site, without network (ARGS go to mkdocs build)
	@$(SETUP) --need all docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build $(ARGS)

frameworks: ## kill workers of accelerate, Lightning, transformers, DeepSpeed, JAX and torchft; writes docs/frameworks.md
	@$(SETUP) --need all dev --want pyspy --label "NOT TESTED"
	@$(PYTHON) tools/frameworks.py
	@failed=; $(BIN)/python -m pytest -v --timeout 2000 frameworks $(ARGS) || failed=" pytest"; \
	$(CLOSE)

lint: ## ruff and mypy only
	@$(SETUP) --need all dev
	@failed=; $(LINT); \
	$(CLOSE)

clean: ## remove .venv, caches and built files
	rm -rf .venv .venv-frameworks .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
