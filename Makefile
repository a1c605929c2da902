# make setup   .venv with everything pinned, the tools of the tests, the embedded model and data
# make demo    the same without the tools of the tests, then a federation of nine clients: it says how many minutes first
# make demo-vision    a hundred clients with images on a vision transformer
# make test    lint, format, types, import rules, and the quick tests: laws, parity, units, a short real training that is
#              audited, and of each kind of training a run, a resume after a kill, a served federation, a failing audit
# make test-rest   the tests that `make test` leaves out: kills, faults, engines, combinations; all examples of the laws
# make test-all    lint and every test with all examples, products of all methods, families and tasks included: hours
# make package-check    the wheel and the source archive: built, looked into, and the wheel run in an empty environment
# make site    the documentation site, build/site/html/index.html; a link that leads nowhere ends it
# make notebooks    the notebooks of examples/ executed, and stored with what they put out
# make lock    requirements/*.txt anew, with the hashes of what pip's index offers for the versions of constraints.txt
# make sbom    sbom.json anew: what is installed and fetched, with licences and hashes
# make audit-dependencies    looks the pinned versions up in a database of known vulnerabilities; needs the network
#
# Everything is installed with `pip install --require-hashes` from the lock files in requirements/ (tools/install.py).
# A stamp in .venv stands for each step of the set-up that is done, so nothing is done twice.

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: setup demo demo-vision test test-rest test-all lint unit package-check site notebooks lock sbom audit-dependencies clean

PYTHON ?= python3 python3.13 python3.12 python3.11
BIN := .venv/bin
INSTALL := $(BIN)/python -m tools.install
LOCKS := tools/install.py $(wildcard requirements/*.txt)
# A test is handed to whichever worker is free; the durations of all tests are left in a table.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --dist worksteal
DURATIONS := build/durations

setup: .venv/dev.stamp .venv/fetched.stamp

demo: .venv/fetched.stamp
	@$(BIN)/atlas demo

demo-vision: .venv/vision.stamp
	$(BIN)/atlas run --preset vision-quick --resume

# the tests come last, so that their closing line does too
test: lint unit

test-all: lint setup
	$(PYTEST) -n 2 --durations-file=$(DURATIONS)/test-all.tsv

lint: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.code_lines

unit: setup
	HYPOTHESIS_PROFILE=quick $(PYTEST) -n 2 -m "not slow and not product" --durations-file=$(DURATIONS)/test.tsv

# more workers than cores: servers and sites wait for each other
test-rest: setup .venv/llm.stamp
	$(PYTEST) -n 4 -m "(slow or hypothesis) and not product" --durations-file=$(DURATIONS)/test-rest.tsv

package-check: setup
	$(BIN)/python -m tools.package $(PYTHONS)

site: .venv/site.stamp
	$(BIN)/python -m tools.site

notebooks: setup
	$(BIN)/python -m tools.notebooks

lock: .venv/venv.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/build.txt
	$(BIN)/python -m tools.lock

sbom: .venv/dev.stamp
	$(BIN)/python -m tools.sbom

audit-dependencies: .venv/audit.stamp
	$(BIN)/python -m tools.audit_dependencies

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

.venv/venv.stamp:
	@for python in $(PYTHON); do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
		echo "$$python -m venv .venv"; "$$python" -m venv .venv; touch $@; exit 0; \
	done; \
	echo "Python 3.11 or later not found among: $(PYTHON); install one, or name it: make setup PYTHON=/path/to/python"; exit 1

.venv/installed.stamp: .venv/venv.stamp pyproject.toml $(LOCKS)
	$(INSTALL) base
	touch $@

.venv/dev.stamp: .venv/installed.stamp
	$(INSTALL) dev flower ray search xlsx llm dp
	touch $@

.venv/fetched.stamp: .venv/installed.stamp
	$(BIN)/atlas fetch embedded
	touch $@

.venv/llm.stamp: .venv/dev.stamp
	$(BIN)/atlas fetch llm
	touch $@

.venv/vision.stamp: .venv/installed.stamp
	$(INSTALL) vision
	$(BIN)/atlas fetch vision
	touch $@

.venv/audit.stamp: .venv/installed.stamp
	$(INSTALL) audit
	touch $@

.venv/site.stamp: .venv/installed.stamp
	$(INSTALL) site
	touch $@
