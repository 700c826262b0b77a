# Everything runs in its own environment, .venv, made on first use; a second run starts at once.
#   make demo   perplexity of a real model in MXFP4, with and without rotation
#   make test   the test suite (no GPU needed)         make lint     ruff and clang-format
#   make bench  speed on this machine                  make format   rewrite to what lint wants
#   make gfx950 machine code and disassembly           make clean    remove what a build made
#   make test-emulate  the op tests on that machine code, launchers included, executed by the CPU
#   make test-install  the install paths and commands that the documents name, in fresh environments
#   make test-moe-full MoE layers of real models at full size on that machine code: minutes a model

PYTHON ?= python3
VENV   ?= .venv
# Compilers take about 1 GB each.
MAX_JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
export MAX_JOBS
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PATH := $(abspath $(VENV))/bin:$(PATH)

# A stamp records a finished step. They live in the environment and vanish with it.
DONE := $(VENV)/.done
PIP  := $(VENV)/bin/python -m pip install --quiet
BUILD_INPUTS := $(shell find csrc build_backend -type f -not -name '*.pyc') setup.py pyproject.toml
EMULATOR_INPUTS := $(shell find emulator/csrc emulator/src -type f -not -name '*.pyc' -not -name '*.so') emulator/setup.py emulator/pyproject.toml
LINT_CXX = find csrc emulator tests bench -name '*.h' -o -name '*.cpp' -o -name '*.hip' -o -name '*.cu'

.PHONY: demo test test-emulate test-install test-moe-full bench lint format gfx950 clean
.DELETE_ON_ERROR:

demo: $(DONE)/extension $(DONE)/demo
	$(VENV)/bin/python -m rotquant_hip demo

test: $(DONE)/extension $(DONE)/test $(DONE)/demo $(DONE)/emulator gfx950
	$(VENV)/bin/python -m pytest

bench: $(DONE)/extension $(DONE)/demo
	$(VENV)/bin/python bench/rotate_quant.py
	$(VENV)/bin/python bench/fused_moe.py

lint: $(DONE)/lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(LINT_CXX) | xargs $(VENV)/bin/clang-format --dry-run -Werror

format: $(DONE)/lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(LINT_CXX) | xargs $(VENV)/bin/clang-format -i

gfx950: $(DONE)/test
	cmake -S . -B build/gfx950 -G Ninja
	cmake --build build/gfx950 --target gfx950

# A second build of the extension (build_backend/emulate.py), beside the ordinary one.
EMULATED_TESTS := tests/test_rotate_quant.py tests/test_layout_ops.py tests/test_contract.py tests/test_mfma.py \
	tests/test_moe_sort.py tests/test_moe_rotate_quant.py tests/test_moe_gemm.py tests/test_moe_reduce.py tests/test_fused_moe.py \
	tests/test_moe_ownership.py
test-emulate: $(DONE)/emulator
	ROTQUANT_HIP_EMULATE=1 $(VENV)/bin/python setup.py --quiet build --build-base build/emulate --build-lib build/emulate/lib
	PYTHONPATH=build/emulate/lib:tests $(VENV)/bin/pytest -p emulated $(EMULATED_TESTS)

test-install: $(DONE)/extension $(DONE)/test $(DONE)/emulator gfx950
	$(VENV)/bin/python bench/gfx950_counts.py --quick
	$(VENV)/bin/python bench/gfx950_moe_counts.py --quick
	$(VENV)/bin/python tests/install_paths.py

test-moe-full: $(DONE)/extension $(DONE)/test $(DONE)/emulator gfx950
	$(VENV)/bin/python tests/moe_full_shapes.py

clean:
	rm -rf build dist *.egg-info rotquant_hip/_C.*.so rotquant_hip/_build_info.json $(DONE)/extension
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(DONE)/venv:
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(@D) && touch $@

$(DONE)/torch: requirements/torch.txt requirements/build.txt | $(DONE)/venv
	$(PIP) -r requirements/torch.txt -r requirements/build.txt
	touch $@

# Without build isolation: everything needed has just been installed at a pinned version.
$(DONE)/extension: $(BUILD_INPUTS) $(DONE)/torch
	$(PIP) --no-build-isolation --no-deps -e .
	touch $@

$(DONE)/test: requirements/test.txt | $(DONE)/torch
	$(PIP) -r $<
	touch $@

$(DONE)/emulator: $(EMULATOR_INPUTS) requirements/emulator.txt | $(DONE)/test
	$(PIP) -r requirements/emulator.txt
	$(PIP) --no-build-isolation --no-deps ./emulator
	touch $@

$(DONE)/demo: requirements/demo.txt requirements/demo-nodeps.txt | $(DONE)/torch
	$(PIP) -r requirements/demo.txt
	$(PIP) --no-deps -r requirements/demo-nodeps.txt
	touch $@

$(DONE)/lint: requirements/lint.txt | $(DONE)/venv
	$(PIP) -r $<
	touch $@
