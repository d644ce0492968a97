# Everything runs in .venv, made from the lock when it is missing.

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test retest check protos bench lock clean

demo: $(READY)  ## one model over three nodes on this machine, from nothing to an answer
	$(PYTHON) -m examples.demo

test: $(READY)  ## every test, two at a time: they wait for processes more than they compute
	$(PYTHON) -m pytest --numprocesses 2

retest: $(READY)  ## what failed in the last run of the tests, one after the other
	$(PYTHON) -m pytest --last-failed --last-failed-no-failures none

check: $(READY)  ## style, types, import rules, protos, migrations
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	cd protos && ../$(VENV)/bin/buf lint && ../$(VENV)/bin/buf breaking . --against released.binpb
	$(PYTHON) -m pytest -q tests/repository

protos: $(READY)  ## the generated code
	$(PYTHON) protos/generate.py

bench: $(READY)  ## the figures of design.md section 11; SECTION=probe|log|placement|runner|prefill|requests for one
	$(PYTHON) -m benchmarks $(if $(SECTION),--section $(SECTION))

lock:  ## the exact versions, after a change of pyproject.toml; needs uv
	uv pip compile pyproject.toml --group dev --universal --generate-hashes --no-emit-index-url -q -o requirements.lock

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(READY): requirements.lock pyproject.toml
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --require-hashes --requirement requirements.lock
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
