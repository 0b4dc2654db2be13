# `make demo` and `make test` need Python 3.11 or later, and `make test` a C compiler; everything else is set up in .venv.
PYTHON ?= python3
VENV ?= .venv
ADDRESS ?= 127.0.0.1:10420
CONFIG ?=
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo run test lint format bench docs clean

demo: $(VENV)/.installed
	@echo "A simulated host with four cards. Open http://$(ADDRESS)/metrics, and stop with Control-C."
	@exec $(BIN)/gpu-fleet-exporter --config.file=docs/demo.yaml --web.listen-address=$(ADDRESS)

run: $(VENV)/.installed-all
	@exec $(BIN)/gpu-fleet-exporter $(if $(CONFIG),--config.file=$(CONFIG)) --web.listen-address=$(ADDRESS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.installed-dev
	$(BIN)/python -m tests.bench

docs: $(VENV)/.installed-dev
	$(BIN)/python -m tests.metrics_page > docs/metrics.md
	$(BIN)/python -m tests.masks_page

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

# A stamp, and not the interpreter, tells a finished environment: one whose making was interrupted is made again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-all: pyproject.toml | $(VENV)/.created
	$(PIP) --editable '.[all]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	$(PIP) --editable '.[test,lint]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-all
