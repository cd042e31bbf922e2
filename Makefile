# One line per target; `make` alone prints them.
PYTHON ?= python3
BIN := .venv/bin
TORCH := 2.13.0
MORE ?=
PYTEST := $(BIN)/python -m pytest -q --durations=10 $(MORE)
WORKERS := -n 4 --dist loadfile --no-loadscope-reorder
SERIAL = $(shell grep -rl "mark\.serial" --include="test_*.py" tests)
PYTHON_CHECK := (3, 11) <= sys.version_info < (3, 13) or sys.exit("needs Python 3.11 or 3.12: make PYTHON=python3.12")

unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes: none should compile again

help:        ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## */\t/' | expand -t 13

setup: .venv/ready  ## make .venv with everything (torch first, pinned)

.venv/ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; $(PYTHON_CHECK)'
	@echo "fetching and unpacking 2 GB: two minutes, or more where the network is slow"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==$(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: setup  ## answer questions over shared documents, sharing on and off
	$(BIN)/mainstem demo --out out/demo.jsonl

test: setup lint  ## lint, types, tests: 10 minutes on 2 quiet cores
	$(PYTEST) $(WORKERS) -m "not gpu and not slow and not serial"
	$(PYTEST) -m "not gpu and not slow and serial" $(SERIAL)
	@$(BIN)/python -m tests.needs

test-full: setup lint  ## the long tests too
	$(PYTEST) $(WORKERS) -m "not gpu and not serial"
	$(PYTEST) -m "not gpu and serial" $(SERIAL)
	@$(BIN)/python -m tests.needs

test-hard: setup  ## make test three times, with busy cores, on one core, as on an older CPU
	for run in 1 2 3; do $(MAKE) test || exit 1; done
	$(BIN)/python -c 'while True: pass' & one=$$!; $(BIN)/python -c 'while True: pass' & two=$$!; \
	  $(MAKE) test; status=$$?; kill $$one $$two; exit $$status
	taskset -c 0 $(MAKE) test
	ATEN_CPU_CAPABILITY=default MAINSTEM_TEST_ONEDNN=off $(MAKE) test

test-gpu:    ## what needs a CUDA device; uses the python on PATH
	PYTHONPATH=src:. $(PYTHON) -m tests.gpu.many

sanitize:    ## small attention cases under compute-sanitizer, on a CUDA device
	PYTHONPATH=src:. PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
	  compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) -m pytest -q -m gpu \
	  tests/gpu/test_span_gpu.py -k "named and (page or depth or prefill)"
	# not over attention/hopper/*.py: racecheck does not pair the barriers of warps that run different code
	PYTHONPATH=src:. PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
	  compute-sanitizer --tool racecheck --error-exitcode 1 $(PYTHON) -m pytest -q -m gpu \
	  tests/gpu/test_span_gpu.py -k "deterministic_setting and (depth or prefill)"

lint: setup  ## ruff, mypy, typos, plain words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy || { [ $$? -eq 2 ] && $(BIN)/mypy --num-workers 0; }  # its workers have 3 s to start
	$(BIN)/typos
	$(BIN)/python -m tests.plain_words

docs: setup  ## pages and plots of results, from benchmarks/results/
	$(BIN)/python benchmarks/pages.py

bench: setup  ## CPU benchmarks, ours and the rivals that are installed
	$(BIN)/mainstem bench host --json
	$(BIN)/mainstem bench attention --json
	$(BIN)/mainstem bench cpu --json

.PHONY: help setup demo test test-full test-hard test-gpu sanitize lint docs bench
