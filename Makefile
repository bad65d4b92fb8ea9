# `make setup` once; every other target runs it when pyproject.toml or constraints.txt have changed.
#   PYTHON=python3.12   the interpreter to use (3.11 or newer; found by itself when not given)
#   TORCH_INDEX=URL     a package index with CPU builds of torch, much smaller than the default ones
#   ARGS="-k room"      more arguments for pytest or kvflow
#   WORKERS=3           processes that share the tests; 0 runs them in one, as a debugger needs it
VENV ?= .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.setup-done
VLLM_VENV ?= .venv-vllm
VLLM_DONE := $(VLLM_VENV)/.setup-done
SGLANG_VENV ?= .venv-sglang
SGLANG_DONE := $(SGLANG_VENV)/.setup-done
CLIENTS_VENV ?= .venv-clients
CLIENTS_DONE := $(CLIENTS_VENV)/.setup-done
CODE := kvflow tests docs $(wildcard examples)
ARGS ?=
# One more than the cores of a small machine: many tests wait for a process, a link or a timer.
WORKERS ?= 3
SLOW_WORKERS ?= 3
export PYTHON TORCH_INDEX
# The tests start hundreds of processes, and without cached bytecode each of them compiles all of kvflow anew: half of the
# CPU time of tests/transports. An empty value is the same to Python as none.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test coverage slow soak vllm sglang clients prove mutants check format lint types borders deployment collect rules workflows docs bench gpu clean

setup: $(DONE)

$(DONE): pyproject.toml constraints.txt .ci/setup
	.ci/setup $(VENV)
	touch $@

demo: setup
	$(BIN)/kvflow demo $(ARGS)

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --durations=15 --durations-min=2 \
	    -m "not slow and not gpu" $(ARGS)

# What the tests of the library's core reach, by lines and branches. Tracing takes its time, so `make test` does without.
coverage: setup
	$(BIN)/python -m coverage run -m pytest -q -m "not slow and not gpu" tests/protocols tests/handlers tests/memory $(ARGS)
	$(BIN)/python -m coverage report

# They freeze and kill whole fleets and measure growth. Those that start processes belong to a group (xdist_group
# "fleets", "processes", "printed", ...), and no two of one group meet.
slow: setup
	$(BIN)/python -m pytest -n $(SLOW_WORKERS) --dist loadgroup --durations=25 --durations-min=5 \
	    -m "slow and not soak and not gpu and not vllm and not sglang and not clients" $(ARGS)

# The slow tests at full size, and more planes, families and victims: hours. A workflow runs it every week.
soak: setup
	TEST_SOAK=1 $(BIN)/python -m pytest -n $(SLOW_WORKERS) --dist loadgroup --durations=25 --durations-min=5 \
	    -m "slow and not gpu and not vllm and not sglang and not clients" $(ARGS)

# `vllm serve` runs in an environment of its own: its pins are not ours.
vllm: setup $(VLLM_DONE)
	TEST_VLLM_VENV=$(abspath $(VLLM_VENV)) $(BIN)/python -m pytest -m "vllm and not soak" $(ARGS)

$(VLLM_DONE): pyproject.toml .ci/vllm-requirements.txt .ci/setup-vllm
	.ci/setup-vllm $(VLLM_VENV)

# So do SGLang's servers. ARGS="-m sglang" also runs what is marked `soak`.
sglang: setup $(SGLANG_DONE)
	TEST_SGLANG_VENV=$(abspath $(SGLANG_VENV)) $(BIN)/python -m pytest -m "sglang and not soak" \
	    --durations=15 --durations-min=5 $(ARGS)

$(SGLANG_DONE): pyproject.toml .ci/sglang-requirements.txt .ci/setup-sglang
	.ci/setup-sglang $(SGLANG_VENV)

# Clients of OpenAI's and Anthropic's routes, whose pins are not ours either.
clients: setup $(CLIENTS_DONE)
	TEST_CLIENTS_VENV=$(abspath $(CLIENTS_VENV)) $(BIN)/python -m pytest -m clients --durations=10 $(ARGS)

$(CLIENTS_DONE): .ci/clients-requirements.txt .ci/clients-openai-2-requirements.txt .ci/setup-clients
	.ci/setup-clients $(CLIENTS_VENV)

prove: setup
	$(BIN)/kvflow sim --plant all $(ARGS)
	$(BIN)/kvflow sim --bare --plant all $(ARGS)
	$(BIN)/kvflow sim --group 4 --plant all $(ARGS)
	$(BIN)/kvflow sim --cache --plant all $(ARGS)

mutants: setup
	$(BIN)/python -m tests.proof.mutants $(ARGS)

check: lint types workflows borders deployment collect rules

format: setup
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

lint: setup
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: setup
	$(BIN)/mypy

# Who may import whom, and how long files and functions are.
borders: setup
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/house/test_sizes.py tests/house/test_floors.py

# Units by systemd-analyze, images by hadolint, manifests by Kubernetes' schemas. A program that is absent is named.
deployment: setup
	$(BIN)/python -m pytest -q -m "not slow" tests/test_units.py tests/test_images.py tests/test_manifests.py

# Every test module can be imported. The processes that share the tests later find its bytecode, and rewrite nothing.
collect: setup
	$(BIN)/python -m pytest --collect-only -qq > /dev/null

# Alert rules by promtool, which .ci/setup unpacks on Debian, and the dashboard: what they name is what kvflow exports.
rules: setup
	$(BIN)/python -m pytest -q tests/test_monitoring.py

# Valid, pinned, and with no more rights than needed; offline, so it does not ask whether a pin has a known fault.
workflows: setup
	$(BIN)/zizmor --offline --quiet --pedantic --strict-collection .github/workflows .github/dependabot.yml

# The site, in site/; a warning of any kind fails. The variable silences an advertisement, which is no warning.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

bench: setup
	$(BIN)/kvflow bench transfer $(ARGS)
	$(BIN)/kvflow bench rooms $(ARGS)

gpu: setup
	$(BIN)/python -m pytest -m gpu $(ARGS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(CLIENTS_VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage .hypothesis .import_linter_cache
	find kvflow tests -name __pycache__ -type d -prune -exec rm -rf {} +
