.PHONY: demo test test-slow test-adapters check check-lowest reproduce reproduce-quick clean

BIN := .venv/bin

demo: .venv/.installed
	mkdir -p demo
	$(BIN)/kexpfam fit two-moons -o demo/moons.kexpfam --seed 0
	$(BIN)/kexpfam diagnose demo/moons.kexpfam
	$(BIN)/kexpfam sample demo/moons.kexpfam -n 1000 -o demo/samples.csv
	$(BIN)/kexpfam plot demo/moons.kexpfam -o demo/moons.png

# One file per worker at a time: tests of one file share compiled programs. Which files come first is said in tests/conftest.py.
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder
# Short tests wait for the compiler longer than for its programs: it is told not to optimise. Slow ones run what users run.
QUICK_COMPILER := JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS=--xla_cpu_use_fusion_emitters=false

test: .venv/.installed
	$(QUICK_COMPILER) $(PYTEST) -m "not slow"

test-slow: .venv/.installed
	$(PYTEST) -m slow

# Libraries that the adapters speak to, torch among them, live in an environment of their own; their warnings are not ours.
test-adapters: .venv-adapters/.installed
	.venv-adapters/bin/pytest -q -n 2 --dist loadfile -o filterwarnings=default tests_adapters

.venv-adapters/.installed: pyproject.toml
	python3 -m venv .venv-adapters
	.venv-adapters/bin/pip install -q -e ".[arviz,data,mapie,numpyro,sbi,skpro]" pytest pytest-xdist
	touch $@

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The lower bounds of pyproject.toml are installed in an environment of their own, and a short walk is taken there.
check-lowest:
	python3 -m venv .venv-lowest
	sed -n '/^dependencies = \[/,/^\]/s/^  "\([A-Za-z-]*\)>=\([0-9.]*\)",$$/\1==\2/p' pyproject.toml > .venv-lowest/lowest.txt
	.venv-lowest/bin/pip install -q -c .venv-lowest/lowest.txt .
	KEXPFAM_CACHE=off .venv-lowest/bin/python tests/smoke.py
	rm -rf .venv-lowest

# Every table and figure of the paper, cell by cell; cells that have a record are skipped. Hours, on two cores.
reproduce: .venv/.installed
	$(BIN)/kexpfam reproduce all

# The same on small sizes; a cell that fails there is a defect.
reproduce-quick: .venv/.installed
	$(BIN)/kexpfam reproduce all --quick --fresh --quiet | tee reproduction-quick.log
	grep -q "written\.$$" reproduction-quick.log
	rm reproduction-quick.log

# The stamp is touched last, so that an installation that broke off is done again.
.venv/.installed: pyproject.toml constraints.txt
	python3 -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-adapters .venv-lowest demo reproduction-quick build src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
