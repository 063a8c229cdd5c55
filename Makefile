# `make demo` and `make test` do all the set-up that a fresh machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= auto
SHARE ?= 8
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal  # a thread for each worker
EACH = OMP_NUM_THREADS=1 xargs -t -P $$(nproc) -I {}  # so many at a time as there are cores
RUN := $(VENV)/.run-installed
DEV := $(VENV)/.dev-installed
DOCS := $(VENV)/.docs-installed
RELEASE := $(VENV)/.release-installed
LOWEST := $(VENV)-lowest
ADAPTERS := $(VENV)-adapters

.PHONY: demo test examples docs notebooks lint format bench bench-gpu bench-report audit fresh nightly dist wheel-check resolve security coverage mutants hashes lowest adapters clean

demo: $(RUN)  ## Train by photonic DFA, backpropagation and digital DFA on digits; open runs/demo/report.html.
	$(BIN)/python -m benchmarks.pdfa.demo

test: $(DEV)  ## The tests of CI; tests that take minutes are left to `make nightly`.
	$(PYTEST)

examples: $(DEV)  ## One script for each framework, also private ones, and the gallery; some seconds each.
	mkdir -p build/gallery
	ls examples/any_module/*.py examples/private/*.py | $(EACH) $(BIN)/python {}
	ls examples/gallery/*.py examples/optical/*.py | $(EACH) sh -c '$(BIN)/python {} build/gallery/$$(basename {} .py).png'

docs: $(DOCS)  ## The documentation, into docs/_build; a warning is an error.
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

notebooks: $(DOCS)  ## Execute the notebooks of docs/notebooks in place, after a change; some minutes.
	OMP_NUM_THREADS=1 $(BIN)/python .ci/notebooks.py

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV)  ## Speed, as ratios in one run.
	$(BIN)/python -m benchmarks.speed.projections
	$(BIN)/python -m benchmarks.speed.steps
	$(BIN)/python -m benchmarks.speed.module_steps
	$(BIN)/python -m benchmarks.speed.low_rank_directions
	$(BIN)/python -m benchmarks.speed.accounting
	$(BIN)/python -m benchmarks.speed.served
	$(BIN)/python -m benchmarks.speed.operators
	$(BIN)/python -m benchmarks.speed.run_steps
	$(BIN)/python -m benchmarks.speed.walk

bench-gpu: $(DEV)  ## What a graphics card gains, against other code on the same card; needs one.
	$(BIN)/python -m benchmarks.speed.gpu
	$(BIN)/python -m benchmarks.speed.card_steps

bench-report: $(DEV)  ## Write the pages that show what benchmarks/results/ holds.
	$(BIN)/python -m benchmarks.pages

audit: $(DEV)  ## Planted faults by audit and every statement beside its audit, resumed where it stopped; some hours.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.attacks.self_test measure
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.attacks.one_run measure
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.attacks.guarantees measure
	$(BIN)/python -m benchmarks.pages

fresh: $(DEV)  ## All tests, also the slow ones, with fresh seeds; a test that fails prints its seeds.
	OPUSIM_FRESH_SEEDS=1 $(PYTEST) -m "slow or not slow"

nightly: fresh adapters  ## `fresh` and `adapters`, then `coverage`, with the kernels uncompiled as well.
	$(MAKE) -j2 coverage

dist: $(RELEASE)  ## Wheel and sdist, built twice and compared byte by byte, and what they need (CycloneDX).
	$(BIN)/python .ci/dist.py --check dist
	$(BIN)/cyclonedx-py requirements --output-reproducible -o dist/sbom.json requirements.txt

wheel-check: $(RELEASE)  ## The wheel in an empty environment, and every command of getting-started there; some minutes.
	$(BIN)/python .ci/wheel_check.py

security: $(RELEASE)  ## Suspicious code, and known vulnerabilities of what is pinned (asks the network, and fails without an answer).
	$(BIN)/bandit --quiet -ll --recursive --configfile pyproject.toml opusim training accounting hw_configs
	$(BIN)/pip-audit --strict --no-deps --disable-pip -r requirements.txt

resolve: $(RELEASE)  ## Whether everything that setup.cfg requires has wheels for Python 3.11 to 3.14; a minute.
	$(BIN)/python .ci/resolve.py

# A piece for each folder and each test file beside them, with the kernels compiled (what uses them) and uncompiled (they
# themselves). A piece that is done is not run again until a file changes.
TESTED := $(sort $(patsubst %/,%,$(dir $(wildcard tests/accounting/*/test_*.py tests/opusim/*/test_*.py))) $(wildcard tests/accounting/test_*.py tests/opusim/test_*.py))
PIECES := $(TESTED:%=build/coverage/compiled/%.data) $(TESTED:%=build/coverage/uncompiled/%.data)
SOURCES := $(shell find accounting opusim tests -name '*.py')
MEASURE = mkdir -p $(@D) && rm -f $@.part && OMP_NUM_THREADS=1 $(1) $(BIN)/coverage run --data-file=$@.part -m pytest -q -p no:cacheprovider -m $(2) $* && mv $@.part $@

coverage: $(PIECES)  ## Lines that the tests of accounting and opusim reach; below the floor it fails; it resumes.
	$(BIN)/coverage combine --quiet --keep --data-file=build/coverage/all $(PIECES)
	$(BIN)/coverage report --data-file=build/coverage/all

build/coverage/compiled/%.data: $(SOURCES) | $(RELEASE)
	$(call MEASURE,,"not slow")

build/coverage/uncompiled/%.data: $(SOURCES) | $(RELEASE)
	$(call MEASURE,NUMBA_DISABLE_JIT=1,"not compiled and not slow")

mutants: $(RELEASE)  ## One in SHARE mutants of the accounting's core; fails if over 15 % survive; build/mutants resumes.
	OMP_NUM_THREADS=1 $(BIN)/python .ci/mutants.py --share $(SHARE) --least 85

hashes: $(RELEASE)  ## The hashes of what requirements.txt pins, and the licences.
	$(BIN)/pip-compile --quiet --generate-hashes --no-header --allow-unsafe --no-emit-index-url --no-emit-find-links --no-annotate --strip-extras -o requirements-hashes.txt requirements.txt
	sed -i -e '1i # Pinned with hashes: pip install --require-hashes -r requirements-hashes.txt; written by `make hashes`.' \
	  -e '1i # torch is the CPU wheel of https://download.pytorch.org/whl/cpu for CPython 3.11 on Linux (x86-64); for another one, put its hash here.' requirements-hashes.txt
	$(BIN)/python .ci/third_party.py

lowest:  ## The tests on the lowest versions that setup.cfg admits; where torch 2.6 has CUDA wheels only, 6 GB of disk.
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet -r requirements-lowest.txt "pyzmq==26" pytest hypothesis "setuptools>=77.0.3,<81" numexpr attrs requests
	$(LOWEST)/bin/python -m pip install --quiet --no-deps lightonml==1.4.3
	$(LOWEST)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -q -W default::DeprecationWarning tests/accounting tests/opusim

adapters:  ## Adapters of instruments on their libraries' simulators, in an environment of their own; 15 minutes.
	$(PYTHON) -m venv $(ADAPTERS)
	$(ADAPTERS)/bin/python -m pip install --quiet -r requirements.txt pytest hypothesis mm-test-adapters "setuptools>=77.0.3" traker reservoirpy
	$(ADAPTERS)/bin/python -m pip install --quiet --no-build-isolation --editable ".[slmsuite,alp4,pylablib,pylon,genicam,micromanager,bluesky]"
	OMP_NUM_THREADS=1 $(ADAPTERS)/bin/python -m pytest -q -m "slow or not slow" tests/opusim/devices/test_adapters.py tests/opusim/features/test_other_libraries.py

clean:
	rm -rf $(VENV) $(LOWEST) $(ADAPTERS) build dist docs/_build docs/jupyter_execute *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name '*.nb[ci]' -delete  # numba's cache does not see changes in imported kernels

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(RUN): requirements.txt setup.cfg pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# lightonml's own pins cannot be met today, so it is installed without them, after what it really needs.
$(DEV): requirements-dev.txt $(RUN)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps lightonml==1.4.3
	touch $@

$(RELEASE): requirements-release.txt $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-release.txt
	touch $@

$(DOCS): requirements-docs.txt $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@
