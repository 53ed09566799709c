# Needs nothing but Python. Each torch version has its own environment in .venv/, made on first use and left alone after.

PYTHON  ?= python3
TORCH   ?= 2.13.0
WORKERS ?= 2
ARGS    ?=

VENV  := .venv/$(TORCH)
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
PINS  := constraints/common.txt $(wildcard constraints/torch-$(TORCH).txt)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all integrations trainers torchtitan zoo docs lint format types mutations clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  TORCH=$(TORCH)  the torch to use; others: $(filter-out $(TORCH),$(patsubst constraints/torch-%.txt,%,$(wildcard constraints/torch-*.txt)))"
	@echo "  ARGS=...      arguments for pytest or the example (make demo); make test runs all that they choose"
	@echo "  PYTHON=$(PYTHON)  WORKERS=$(WORKERS)"
	@echo "  CONTRIBUTING.md has the markers of tests and the quick loop"

demo: $(READY)  ## train a small GPT with and without packed activations; writes to out/
	$(BIN)/python examples/train_gpt.py --check $(ARGS)

# One thread a worker: the workers are the parallelism, and Inductor's own pool would only fight them for the cores.
test test-all mutations: export OMP_NUM_THREADS ?= 1
test test-all mutations: export TORCHINDUCTOR_COMPILE_THREADS ?= 1
test: $(READY)  ## the tests that a change must pass; ARGS="-m core", ARGS="-k inline", TORCH=2.15.0
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(or $(ARGS),--slow-share by-commit --durations=25)

test-all: $(READY)  ## all tests, slow ones as well
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

mutations: $(READY)  ## break the code in known ways, one by one: tests must fail; ARGS=host for some of them
	$(BIN)/python tests/support/mutations.py $(ARGS)

# In environments on top of that of the tests, which has torch.
trainers zoo torchtitan: export OMP_NUM_THREADS ?= 1
trainers zoo torchtitan: export TORCHINDUCTOR_COMPILE_THREADS ?= 1
integrations: trainers zoo  ## the trainers and the zoo

trainers: $(VENV)-integrations/.ready  ## tests with the real transformers, TRL, Accelerate, Lightning and torchao
	$(VENV)-integrations/bin/python -m pytest -n $(WORKERS) --dist load tests/integrations \
		--ignore tests/integrations/test_torchtitan.py --ignore tests/integrations/test_zoo.py \
		--ignore tests/integrations/test_printed_recipes.py $(ARGS)

# Its time limits are its own. A model takes 5 to 90 seconds of processor time with aten, one of twelve with Inductor up
# to ten minutes.
zoo: $(VENV)-zoo/.ready  ## gradients of 47 models of transformers, diffusers, timm, peft and torch-geometric
	timeout 5400 $(VENV)-zoo/bin/python -m pytest -n $(WORKERS) --dist load -o timeout=1800 tests/integrations/test_zoo.py $(ARGS)

torchtitan: $(VENV)-torchtitan/.ready  ## tests with the real torchtitan
	$(VENV)-torchtitan/bin/python -m pytest tests/integrations/test_torchtitan.py $(ARGS)

docs: $(VENV)-docs/.ready  ## the pages of docs/ and the API reference, in out/site
	$(VENV)-docs/bin/mkdocs build --strict --quiet

lint: $(READY)  ## ruff: rules and format, changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## ruff: fix and format in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)  ## mypy, strict
	$(BIN)/mypy

clean:  ## remove environments, caches and outputs
	rm -rf .venv build dist out *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache torch_compile_debug
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)-%/.ready: constraints/%.txt $(READY)
	@echo "installing $* into $(VENV)-$*, once"
	test -x $(VENV)-$*/bin/python || $(BIN)/python -m venv $(VENV)-$*
	echo "import site; site.addsitedir('$$($(BIN)/python -c "import sysconfig as s; print(s.get_path('purelib'))")')" \
		> $$($(VENV)-$*/bin/python -c "import sysconfig as s; print(s.get_path('purelib'))")/below.pth
	$(VENV)-$*/bin/python -m pip install --quiet -r constraints/$*.txt
	touch $@

$(READY): pyproject.toml $(PINS)
	@echo "installing torch $(TORCH) and the tools into $(VENV), once"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==$(TORCH)" $(addprefix -c ,$(PINS)) -e ".[test,lint,plot,report]"
	touch $@
