# Every target makes the environment it needs. Another Python: make install PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
STAMP := $(VENV)/.installed
PEERS := .venv-peers
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
# Mostly pure logic: 1,600 tests in 40 s on 2 cores.
FAST := $(addprefix tests/,data profiling simulate eval/test_topk_metrics.py eval/test_label_metrics.py models/test_losses.py \
	pipeline/test_schedule.py serve/test_kv_cache.py serve/test_prefill_policy.py gateway/test_router.py test_config.py \
	test_jagged.py test_links.py test_project.py test_public_snapshot.py test_rng.py)
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.PHONY: help install demo check test soak docs lint format types peers clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## */\1\t/p' Makefile | expand -t 10

install: $(STAMP)  ## make .venv with nestpipe and the development tools

demo: install  ## run the demonstration; it checks itself
	$(BIN)/nestpipe demo

check: install lint types  ## lint, types and the fast tests; under 2 minutes on 2 cores
	$(BIN)/python -m pytest -n 2 $(FAST)

test: install lint types  ## lint, types and every test; what CI runs
	$(BIN)/python -m pytest -n 2 --dist worksteal

docs: $(VENV)/.docs  ## the documentation site in build/site; a warning is an error
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

soak: install  ## the same tests with large counts; takes long
	$(BIN)/python -m pytest -n 2 --soak --timeout=3600

lint: install  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install  ## mypy --strict
	$(BIN)/mypy

peers: $(PEERS)/.installed  ## make .venv-peers, where benchmarks run TorchRec next to nestpipe; compare models with published code
	PYTHONPATH=. $(PEERS)/bin/python benchmarks/reference_parity.py

clean:  ## remove what make made; compiled kernels are in ~/.cache/nestpipe/kernels
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The plain name brings gigabytes of CUDA on Linux, so the CPU build is asked for first. A torch of the right version
# that is already in the environment stays, whatever device it was built for.
define install_torch
	@if $(1)/bin/python -c "import importlib.metadata as m; assert m.version('torch').split('+')[0] == '$(TORCH)'" 2>/dev/null; then \
		echo "torch $(TORCH): already in $(1)"; \
	elif $(1)/bin/python -m pip install --quiet --no-deps --timeout 15 --retries 1 --index-url $(TORCH_INDEX) "torch==$(TORCH)+cpu" 2>/dev/null; then \
		echo "torch $(TORCH): CPU build"; \
	else \
		echo "torch $(TORCH): no CPU build found for this machine, taking pip's default build"; \
		$(1)/bin/python -m pip install --quiet --no-deps "torch==$(TORCH)"; \
	fi
endef

define make_venv
	@$(PYTHON) -c "import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f'nestpipe needs Python 3.11 or newer, but $(PYTHON) is {v}; try: make install PYTHON=python3.12')"
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

$(STAMP): pyproject.toml constraints.txt
	$(call make_venv,$(VENV))
	$(PIP) install --quiet -c constraints.txt setuptools
	$(call install_torch,$(VENV))
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	@$(BIN)/python -c "from nestpipe.ops.native_library import status; print('native library:', status())" || \
		echo "native library: could not be built; 'nestpipe doctor' explains"
	@touch $@

$(VENV)/.docs: $(STAMP)
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e ".[docs]"
	@touch $@

# Only this pair loads with torch 2.13; its declared versions disagree, hence --no-deps and an environment of its own.
$(PEERS)/.installed: pyproject.toml constraints.txt
	$(call make_venv,$(PEERS))
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt setuptools
	$(call install_torch,$(PEERS))
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -e .
	$(PEERS)/bin/python -m pip install --quiet --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0
	@echo "pip will now complain about torchrec's declared versions; that is known, and the import below is the check"
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt einops iopath pyre-extensions torchmetrics tensordict tqdm
	$(PEERS)/bin/python -c "import torchrec; print('torchrec', torchrec.__version__)"
	@touch $@
