.PHONY: trust demo test test-slow test-adapters docs pages screenshots check check-lowest release-check reproduce reproduce-quick clean

BIN := .venv/bin
# `make test CONSTRAINTS=` installs the newest versions of all dependencies.
CONSTRAINTS := -c constraints.txt

demo: .venv/.installed
	mkdir -p demo
	$(BIN)/kexpfam fit two-moons -o demo/moons.kexpfam --seed 0
	$(BIN)/kexpfam diagnose demo/moons.kexpfam
	$(BIN)/kexpfam sample demo/moons.kexpfam -n 1000 -o demo/samples.csv
	$(BIN)/kexpfam plot demo/moons.kexpfam -o demo/moons.png

# One file per worker at a time: tests of one file share compiled programs. tests/conftest.py orders the files.
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder
# Short tests spend most of their time in the compiler, so its optimisations are off. Slow tests run with them.
# The newest compiler does not know the flag, and ends at a flag that it does not know.
QUICK_COMPILER := JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(if $(CONSTRAINTS),XLA_FLAGS=--xla_cpu_use_fusion_emitters=false)

test: .venv/.installed
	$(QUICK_COMPILER) $(PYTEST) -m "not slow"

test-slow: .venv/.installed
	$(PYTEST) -m slow

# What users are promised, in minutes; FULL=--full takes hours. `make trust FULL="--full --record"` updates docs/trust.md.
SEED := 0
trust: .venv/.installed
	$(BIN)/python -m tools.trust --seed $(SEED) $(FULL)

# The libraries of the adapters, torch among them, have their own environment; their warnings are not errors.
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

# Every page and figure that is made from records, after records have changed.
pages: .venv/.installed
	$(BIN)/kexpfam reproduce page $(foreach page,$(shell grep -l '<!-- records:' README.md docs/*.md docs/decisions/*.md),--tables-in $(page))

# Screenshots for the README; they need a browser.
screenshots: .venv/.installed
	$(BIN)/python tools/screenshots.py

# The site, in site/. Warnings, broken links and errors in the scripts of docs/examples are errors. Scripts that have not changed since
# the last build are not run again; `make clean` removes their output.
docs: .venv/.installed
	$(BIN)/sphinx-build -q -W --keep-going -E -b html docs site
	$(BIN)/python docs/check_links.py site

# Install the lower bounds of pyproject.toml in their own environment and run a short program there.
check-lowest:
	python3 -m venv .venv-lowest
	sed -n '/^dependencies = \[/,/^\]/s/^  "\([A-Za-z0-9-]*\)>=\([0-9.]*\)",$$/\1==\2/p' pyproject.toml > .venv-lowest/lowest.txt
	.venv-lowest/bin/pip install -q -c .venv-lowest/lowest.txt .
	KEXPFAM_CACHE=off .venv-lowest/bin/python tests/smoke.py
	rm -rf .venv-lowest

# Build a wheel from the sdist, check its metadata, install it in an empty environment and run it there.
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

# Every table and figure of the paper; cells that have a record are skipped. Hours on two cores.
reproduce: .venv/.installed
	$(BIN)/kexpfam reproduce all

# The same with small sizes; a cell that fails is a defect.
reproduce-quick: .venv/.installed
	$(BIN)/kexpfam reproduce all --quick --fresh --quiet | tee reproduction-quick.log
	grep -q "written\.$$" reproduction-quick.log
	rm reproduction-quick.log

# The stamp is touched last, so that an incomplete installation is repeated.
.venv/.installed: pyproject.toml constraints.txt
	python3 -m venv .venv
	$(BIN)/pip install -q $(CONSTRAINTS) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-adapters .venv-lowest .venv-release demo site dist docs/gallery docs/tutorials reproduction-quick build src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
