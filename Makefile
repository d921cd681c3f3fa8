# `make demo` and `make test` do everything on a fresh machine with Python 3.10 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := tests/constraints/pinned.txt

# Bytecode is written in any case: hundreds of processes that tests and benchmarks start would compile all, which
# takes three times as long as to import what is compiled, as users have it.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test docs matrix check bench compatibility trainers gpu stress chaos clean

# pip comes first: that of Python 3.11 takes twice as long to choose versions. What builds hotset comes with it:
# pip would install it anew, twice, for itself. Then torch: with it in place no other package pulls in another one.
# What may be imported is compiled on all cores, torch while pip installs the rest; pip would do so on one, at the
# end. (Some files are no valid Python.)
UNUSED := /(tests|pip|setuptools|mypyc?|networkx|fontTools|lexers)/|/ray/(air|dashboard|data|llm|rllib|serve|train|tune)/
COMPILE := $(BIN)/python -m compileall -q -j 0 -x '$(UNUSED)' $(VENV)/lib > /dev/null || true

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip hatchling editables
	$(BIN)/pip install --quiet --no-compile -c $(CONSTRAINTS) torch
	{ $(COMPILE); } & $(BIN)/pip install --quiet --no-compile --no-build-isolation -c $(CONSTRAINTS) \
		-e '.[test,docs]' && wait
	$(COMPILE)
	touch $@

demo: $(VENV)/.installed
	$(BIN)/hotset demo

# Four at once, on two cores too: the tests wait for processes most of the time. The tests of other
# libraries run on their own: a process that has imported them takes three times as long to fork.
test: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder --ignore tests/integrations \
		--junitxml $(VENV)/tests.xml
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/integrations --junitxml $(VENV)/integrations.xml

# The documentation as pages that work from the file system: site/index.html. A broken link is an error.
docs: $(VENV)/.installed
	$(BIN)/python docs/tools/plots.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# The same tests with the oldest and the newest Python, torch and numpy that are promised, in .venv-matrix;
# the interpreters are found by their names, or given: make matrix OLDEST=/path/to/python3.10.
matrix:
	$(PYTHON) tests/matrix.py oldest=$(OLDEST) newest=$(NEWEST)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m benchmark
	$(BIN)/python -m benchmarks

# Programs over other libraries' data, as tests; then their figures, which it writes to docs/compatibility.md.
compatibility: $(VENV)/.installed
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e '.[compatibility]'
	$(BIN)/python -m tests.compatibility
	$(BIN)/python docs/tools/plots.py

# The libraries that people train with, without hotset and with it: a table.
trainers: $(VENV)/.installed
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e '.[trainers]'
	$(BIN)/python examples/trainers/table.py

stress: $(VENV)/.installed
	$(BIN)/python -m tests.stress --seconds 300
	$(BIN)/python -m tests.random_programs --seconds 300
	$(BIN)/python -m tests.random_streams --seconds 300

# On a machine with a GPU: the checks, and the table of figures. Without one it is skipped, and says so.
gpu: $(VENV)/.installed
	$(BIN)/python -m tests.gpu

# Files that try something often, and more often here than in `make test`; then what is marked `chaos`, among it
# variants of tests that `make test` has; then ten minutes of deaths.
THOROUGH := tests/store tests/session/test_session_budgets.py tests/session/test_runtime_dir.py \
	tests/dataset/test_shared_cache.py tests/dataset/test_interrupts.py tests/dataset/test_cache_processes.py \
	tests/determinism/test_fingerprint.py tests/memoize/test_memo.py tests/device/test_sink.py \
	tests/docs/test_site.py

chaos: $(VENV)/.installed
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e '.[chaos]'
	HOTSET_THOROUGH=1 $(BIN)/python -m pytest -q -n 4 --dist loadfile $(THOROUGH)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m chaos
	$(BIN)/python -m tests.chaos --kills 50 --seconds 600

clean:
	rm -rf $(VENV) .venv-matrix build dist bench-out site
