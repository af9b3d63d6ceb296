# Everything here works on a fresh clone: without an active environment, .venv is created and used.

ENV := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX),.venv)
PYTHON := $(ENV)/bin/python
PYTHON3 ?= python3
TORCH ?= torch>=2.10
SANITIZER ?= compute-sanitizer
SANITIZED ?= tests/test_sanitize.py tests/test_sanitize_products.py
BENCH_SECONDS ?= 450

# Where no CUDA toolkit is installed, pip brings nvcc.
HAVE_NVCC := $(or $(CUDA_HOME),$(wildcard /usr/local/cuda/bin/nvcc),$(shell command -v nvcc))
comma := ,
EXTRAS := dev$(if $(HAVE_NVCC),,$(comma)nvcc)

# The installation is editable, so only what changes the extension or its dependencies repeats it.
INSTALLED := $(ENV)/.fusedcuda-installed
BUILT_FROM := $(shell find csrc -type f) \
  setup.py pyproject.toml fusedcuda/_build.py fusedcuda/_toolchain.py

CXX_SOURCES = $(shell find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp')

.PHONY: help install demo test test-gpu bench probe sanitize sass format lint clean

help:
	@echo "make demo        run the demo: a DLRM step with and without fused ops"
	@echo "make test        run the tests (those that need a GPU only where there is one)"
	@echo "make test-gpu    run only the tests that need a GPU"
	@echo "make bench       measure all families on this GPU, against eager, torch.compile and Triton"
	@echo "make probe       measure which epilogues cuBLASLt fuses on this GPU, for linear_act to choose by"
	@echo "make sanitize    run tests/test_sanitize*.py under memcheck, racecheck and initcheck"
	@echo "make sass        registers, vector accesses and spills of every kernel"
	@echo "make install     install torch and this checkout, kernels built, into $(ENV)"
	@echo "make format      rewrite Python with ruff and C++ with clang-format"
	@echo "make lint        check what format would change, and the types with mypy"
	@echo "make clean       delete what was built; the next target that needs it builds again"

# By name it always runs, so that it takes up a changed FUSEDCUDA_BUILD or TORCH_CUDA_ARCH_LIST.
install:
	@rm -f $(INSTALLED)
	@$(MAKE) --no-print-directory $(INSTALLED)

.venv/bin/python:
	$(PYTHON3) -m venv .venv

$(INSTALLED): $(PYTHON) $(BUILT_FROM)
	@echo "== Installing torch and the compilers' Python side (minutes the first time)"
	$(PYTHON) -m pip install '$(TORCH)' 'setuptools>=77,<82' ninja $(if $(HAVE_NVCC),,'cuda-toolkit[nvcc,cccl]>=13.0$(comma)<14')
	@echo "== Building fusedcuda"
	$(PYTHON) -m pip install --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

demo: $(INSTALLED)
	$(PYTHON) -m fusedcuda demo

test: $(INSTALLED)
	$(PYTHON) -m pytest

test-gpu: $(INSTALLED)
	$(PYTHON) -m pytest -m "gpu or gpus"

bench: $(INSTALLED)
	$(PYTHON) -m bench --budget $(BENCH_SECONDS)

probe: $(INSTALLED)
	$(PYTHON) -m bench.probe

# The caching allocator would hide accesses outside of a tensor. racecheck finds false races in
# cuBLAS's kernels, or dies of them.
sanitize: $(INSTALLED)
	for tool in memcheck initcheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $$tool --error-exitcode 1 \
	    $(PYTHON) -m pytest -m gpu $(SANITIZED) || exit 1; \
	done
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool racecheck --kernel-name kns=fusedcuda \
	  --error-exitcode 1 $(PYTHON) -m pytest -m "gpu and not cublas" $(SANITIZED)

sass: $(INSTALLED)
	$(PYTHON) tests/build/sass.py

format: $(INSTALLED)
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .
	$(ENV)/bin/clang-format -i $(CXX_SOURCES)

lint: $(INSTALLED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(ENV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(PYTHON) -m mypy

clean:
	rm -rf build dist *.egg-info fusedcuda/_C.abi3.so fusedcuda/_build_info.json $(INSTALLED)
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
