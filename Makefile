.PHONY: demo test test-slow test-adapters docs screenshots check check-lowest release-check reproduce reproduce-quick clean

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
	.venv-adapters/bin/pip install -q torch==2.13.0
	.venv-adapters/bin/pip install -q -e ".[arviz,data,mapie,numpyro,sbi,skpro]" pytest pytest-xdist
	touch $@

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The pictures of the README; they need a browser.
screenshots: .venv/.installed
	$(BIN)/python tools/screenshots.py

# The site, into site/: a warning is an error, and so is a link of a page that leads nowhere.
docs: .venv/.installed
	$(BIN)/sphinx-build -q -W --keep-going -E -b html docs site
	$(BIN)/python docs/check_links.py site

# The lower bounds of pyproject.toml are installed in an environment of their own, and a short walk is taken there.
check-lowest:
	python3 -m venv .venv-lowest
	sed -n '/^dependencies = \[/,/^\]/s/^  "\([A-Za-z-]*\)>=\([0-9.]*\)",$$/\1==\2/p' pyproject.toml > .venv-lowest/lowest.txt
	.venv-lowest/bin/pip install -q -c .venv-lowest/lowest.txt .
	KEXPFAM_CACHE=off .venv-lowest/bin/python tests/smoke.py
	rm -rf .venv-lowest

# What would be uploaded: a wheel built from the sdist, its metadata checked, installed into an empty environment and tried there.
release-check:
	rm -rf dist .venv-release
	python3 -m venv .venv-release
	.venv-release/bin/pip install -q build twine
	.venv-release/bin/python -m build --outdir dist . > .venv-release/build.log || (cat .venv-release/build.log; false)
	.venv-release/bin/twine check --strict dist/*
	python3 -m venv .venv-release/empty
	.venv-release/empty/bin/pip install -q dist/*.whl
	cd .venv-release && KEXPFAM_CACHE=off empty/bin/python ../tests/smoke.py
	rm -rf .venv-release

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
	rm -rf .venv .venv-adapters .venv-lowest .venv-release demo site dist reproduction-quick build src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
