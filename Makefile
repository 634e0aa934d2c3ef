# Each target that needs the environment builds it first, in .venv, from the pins in requirements/.
# Needed on the host: Python 3.12 or 3.13, and g++ (it compiles the launcher that is linked with every kernel).

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.12 python3.13 python3 $(HOME)/.pyenv/versions/3.1[23].*/bin/python3; do \
	$$p -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
PYTEST := $(BIN)/python -m pytest
PIP := $(BIN)/python -m pip --disable-pip-version-check
COMPILE = $(BIN)/python -m uv pip compile pyproject.toml --quiet --universal --python-version 3.12 --no-annotate \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make requirements'

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu setup-verify setup-ray host demo test test-postgres test-browser test-ray docs docs-generated \
	pages-speed lint format pytest serve test-gpu verify-full verify-compile b200 h200 soak-faults soak-kills soak-cost \
	soak-load soak-ray soak-memory fuzz-api fuzz-bundle \
	requirements clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

host:
	@test -n "$(PYTHON)" || { echo "no Python 3.12 or 3.13 found: install one, or run make PYTHON=/path/to/python3" >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "no g++ found: install it (Debian and Ubuntu: apt-get install g++)" >&2; exit 1; }

# The stamp makes setup idempotent: it runs again only when a pin or the project file changes.
$(VENV)/.stamp-dev: requirements/dev.txt pyproject.toml | host
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -r requirements/dev.txt
	$(PIP) install --quiet --no-deps --editable .
	@touch $@

$(VENV)/.stamp-gpu: requirements/gpu.txt $(VENV)/.stamp-dev
	$(PIP) install --quiet -r requirements/gpu.txt
	@touch $@

$(VENV)/.stamp-verify: requirements/verify.txt $(VENV)/.stamp-dev
	$(PIP) install --quiet -r requirements/verify.txt
	@touch $@

$(VENV)/.stamp-ray: requirements/ray.txt $(VENV)/.stamp-dev
	$(PIP) install --quiet -r requirements/ray.txt
	@touch $@

$(VENV)/.stamp-browser: requirements/browser.txt $(VENV)/.stamp-dev
	$(PIP) install --quiet -r requirements/browser.txt
	@touch $@

$(VENV)/.stamp-docs: requirements/docs.txt $(VENV)/.stamp-dev
	$(PIP) install --quiet -r requirements/docs.txt
	@touch $@

setup: $(VENV)/.stamp-dev  ## build .venv: everything but torch and the checker engine
setup-gpu: $(VENV)/.stamp-gpu  ## add torch, for verifying and measuring on a GPU
setup-ray: $(VENV)/.stamp-ray  ## add Ray, for tuning on more than one machine
setup-verify: $(VENV)/.stamp-verify  ## add the CPU checkers of sm_100a kernels

demo: setup  ## post one job for two architectures, export and load both winners
	@$(BIN)/gemm-tuner demo

lint: setup  ## ruff, mypy --strict, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Where there is a Rust toolchain the checkers of sm_100a run too: their engine's first build takes minutes.
CARGO := $(or $(wildcard $(HOME)/.cargo/bin/cargo),$(shell command -v cargo))
pytest: setup $(if $(CARGO),setup-verify)  ## tests that need no GPU, PostgreSQL or browser
	$(PYTEST) -m 'not gpu and not postgres and not browser'

test-postgres: setup  ## the tests of store, API and tuner on a PostgreSQL server that they start
	$(PYTEST) -m postgres

# The checker of accessibility; MPL-2.0, so it stays out of the repository.
AXE := build/node_modules/axe-core/axe.min.js
$(AXE):
	npm install --silent --no-save --prefix build axe-core@4.14.1

test-browser: $(VENV)/.stamp-browser $(AXE)  ## the pages in Chromium (Debian: chromium; npm: axe-core), screenshots in build/pages
	$(PYTEST) -m browser tests/api

pages-speed: $(VENV)/.stamp-browser  ## first paint of each page, and the page of a study with 50,000 trials
	$(BIN)/python -m tests.soak.pages_speed --out results/host/pages.json

docs: $(VENV)/.stamp-docs docs-generated  ## the documentation site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site

docs-generated: setup  ## write again what the reference takes from the code
	$(BIN)/python -m docs.generate

test: lint pytest  ## lint and pytest

serve: setup  ## API and tuner on this machine
	@$(BIN)/gemm-tuner serve

test-ray: setup-ray  ## the ray engine on a real cluster of 3 nodes on this machine
	$(PYTEST) tests/tuner/test_ray_cluster.py

soak-ray: setup-ray  ## 60 studies on a real cluster whose nodes and tuners are killed
	$(BIN)/python -m tests.soak.ray_kills --studies 60 --trials 50 --out results/soak/ray_kills.json

soak-memory: setup-ray  ## the memory of a tuner over 200,000 trials in 4,000 studies on a real cluster; hours
	$(BIN)/python -m tests.soak.ray_memory --studies 4000 --trials 50 --max-seconds 14400 \
		--out results/soak/ray_memory.json

test-gpu: setup-gpu  ## tests that need a GPU
	$(PYTEST) -m gpu

verify-full: setup-verify  ## sm_100a without a GPU: 400 compiles, planted bugs, 60 configs through the checkers; resumes
	$(PYTEST) -m verify
	$(BIN)/python -m tests.soak.compile_sm100 --count 400 --refused 50 --out results/verify/sm_100a.json
	$(BIN)/python -m tests.soak.mutations --out results/verify/mutations.json
	$(BIN)/python -m tests.soak.check_random --count 60 --out results/verify/checkers.json

verify-compile: setup  ## compile 200 random legal configs of each architecture; none may spill
	$(BIN)/python -m tests.soak.compile_random --arch sm_90a --count 200 --out results/verify/compile_sm_90a.json
	$(BIN)/python -m tests.soak.compile_random --arch sm_100a --count 200 --out results/verify/compile_sm_100a.json

b200: setup-gpu  ## first hour on a fresh B200: presets, 20 configs, ladder, a tuned shape, the model; resumes
	$(BIN)/python -m tests.soak.first_hour --arch sm_100a --out results/b200/first_hour.json

h200: setup-gpu  ## the same on an H200
	$(BIN)/python -m tests.soak.first_hour --arch sm_90a --out results/h200/first_hour.json

soak-faults: setup  ## 2,000 injected faults in a random mix, on invented devices
	$(BIN)/python -m tests.soak.faults --faults 2000 --out results/soak/faults.json

soak-kills: setup  ## kill -9 of the tuner at 200 random moments
	$(BIN)/python -m tests.soak.kills --kills 200 --out results/soak/kills.json

soak-cost: setup  ## what a trial and a question cost on this machine
	$(BIN)/python -m tests.soak.trial_cost --out results/host/trial_cost.json
	$(BIN)/python -m tests.soak.best_latency > results/host/best_latency.json; cat results/host/best_latency.json

fuzz-api: setup  ## 20,000 requests made from the OpenAPI document, right and wrong ones
	$(BIN)/python -m tests.soak.api_schema --examples 20000 --out results/soak/api_schema.json

fuzz-bundle: setup  ## 2,000 changed bundles: each must be refused, or be the same bundle
	$(BIN)/python -m tests.soak.bundle_fuzz --mutations 2000 --out results/soak/bundle_fuzz.json

soak-load: setup  ## the service under load, and GET /v1/best with a million results stored
	$(BIN)/python -m tests.soak.load clients --out results/soak/load.json
	$(BIN)/python -m tests.soak.load best --out results/soak/load.json

requirements: setup  ## pin again from pyproject.toml
	$(PIP) install --quiet uv
	$(COMPILE) --extra tuner --extra postgres --extra dev -o requirements/dev.txt
	$(COMPILE) -c requirements/dev.txt -o requirements/base.txt
	$(COMPILE) -c requirements/dev.txt --extra server -o requirements/server.txt
	$(COMPILE) -c requirements/dev.txt --extra server --extra postgres -o requirements/postgres.txt
	$(COMPILE) -c requirements/dev.txt --extra tuner -o requirements/tuner.txt
	$(COMPILE) -c requirements/dev.txt --extra docs -o requirements/docs.txt
	$(COMPILE) -c requirements/dev.txt --extra browser -o requirements/browser.txt
	$(COMPILE) -c requirements/dev.txt --extra tuner --extra gpu -o requirements/gpu.txt
	$(COMPILE) -c requirements/dev.txt --extra tuner --extra search -o requirements/search.txt
	$(COMPILE) -c requirements/dev.txt --extra tuner --extra postgres --extra dev --extra verify -o requirements/verify.txt
	$(COMPILE) -c requirements/dev.txt --extra tuner --extra postgres --extra ray -o requirements/ray.txt
	$(COMPILE) -c requirements/gpu.txt -c requirements/ray.txt --extra tuner --extra gpu --extra postgres --extra ray \
		-o requirements/raygpu.txt

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build *.egg-info
