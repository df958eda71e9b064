# Every target creates the virtual environment .venv if needed, and again when pyproject.toml or requirements.lock changed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
SEEDS ?= 1000
WORKERS ?= $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) * 2 )))

.PHONY: setup lint format twins reference test nightly simulate crash bench bench-peers bench-pipeline demo screenshots lock clean

setup: $(READY)

$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Holdfast needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/make_twins.py --check
	$(BIN)/python tools/make_reference.py --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

twins: $(READY)
	$(BIN)/python tools/make_twins.py

reference: $(READY)
	$(BIN)/python tools/make_reference.py

# Two processes per core, because many tests wait; WORKERS=0 runs all tests in a single process.
test: $(READY)
	$(BIN)/pytest -n $(WORKERS) --maxprocesses 5 --dist worksteal

nightly: $(READY)
	$(BIN)/pytest -o faulthandler_timeout=0 -m nightly
	$(BIN)/pytest -o faulthandler_timeout=0 tests/faults -k crash --kills 200
	$(BIN)/pytest -o faulthandler_timeout=0 tests/faults/test_server_histories.py -k behave_like_one --histories 500

simulate: $(READY)
	$(BIN)/python -m holdfast.testing.scenarios --seeds $(SEEDS)

crash: $(READY)
	$(BIN)/pytest -o faulthandler_timeout=0 tests/faults/test_crash.py --kills 500

bench: $(READY)
	$(BIN)/python -m benches

bench-peers: $(READY)
	$(BIN)/python -m benches.bench_peers $(ARGS)

bench-pipeline: $(READY)
	$(BIN)/python -m benches.bench_pipeline $(ARGS)

demo: $(READY)
	$(BIN)/holdfast demo $(ARGS)

# Screenshots of the console and of the demo; needs Chromium.
screenshots: $(READY)
	$(BIN)/python tools/make_screenshots.py
	$(BIN)/python tools/make_demo_pictures.py

# Resolve the dependencies in a fresh environment and pin the result.
lock:
	rm -rf .lock-venv && $(PYTHON) -m venv .lock-venv
	.lock-venv/bin/python -m pip install --quiet --upgrade '.[postgres,seal,spark,bench,dev]'
	.lock-venv/bin/python -m pip freeze --exclude holdfast --exclude pip --exclude setuptools > requirements.lock
	rm -rf .lock-venv

clean:
	rm -rf .venv .lock-venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
