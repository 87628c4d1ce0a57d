# `make demo` and `make test` do all their set-up: a fresh machine needs only Python 3.10 to 3.13, make and git.

PYTHON ?= python3
QUESTION ?= What is the capital of Vietnam?

# One environment a TransformerLens version; constraints/ pins what is in it.
ENV_3.9 := .venv
ENV_2.18 := .venvs/tl-2.18
ENV_4.3 := .venvs/tl-4.3

.PHONY: demo test test-all lint pytest-3.9 pytest-2.18 pytest-4.3 study study-page bench bench-table pictures notebooks clean

demo: $(ENV_3.9)/.ready
	$(ENV_3.9)/bin/iglens "$(QUESTION)"

test: lint pytest-3.9

# The suite on every TransformerLens that is supported.
test-all: test pytest-2.18 pytest-4.3

lint: $(ENV_3.9)/.ready
	$(ENV_3.9)/bin/ruff format --check .
	$(ENV_3.9)/bin/ruff check .
	$(ENV_3.9)/bin/pyright --pythonpath $(ENV_3.9)/bin/python

# pytest fails by itself when it finds no test; what it must not do is pass on another TransformerLens than it says.
define check_and_test
	$(1)/bin/python -c 'import importlib.metadata as m; v = m.version("transformer_lens"); assert v == "$(2)", v'
	HF_HUB_OFFLINE=1 $(1)/bin/python -m pytest $(PYTEST_ARGS)
endef

# Only the development environment has playwright. Set IGLENS_TL_BROWSER to a Chromium to run the tests that need one.
pytest-2.18 pytest-4.3: export IGLENS_TL_BROWSER :=

pytest-3.9: $(ENV_3.9)/.ready
	$(call check_and_test,$(ENV_3.9),3.9.0)

pytest-2.18: $(ENV_2.18)/.ready
	$(call check_and_test,$(ENV_2.18),2.18.0)

pytest-4.3: $(ENV_4.3)/.ready
	$(call check_and_test,$(ENV_4.3),4.3.0)

# PyTorch comes first and alone, so that no other package chooses its build.
define install
	$(PYTHON) -c 'import sys; v = sys.version_info; assert (3, 10) <= v < (3, 14), f"needs Python 3.10 to 3.13, not {v}"'
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install -q -c constraints/tl-$(2).txt torch==2.13.0
	$(1)/bin/python -m pip install -q -c constraints/tl-$(2).txt hatchling editables
	$(1)/bin/python -m pip install -q -c constraints/tl-$(2).txt --no-build-isolation -e '.[$(3)]'
	touch $(1)/.ready
endef

$(ENV_3.9)/.ready: pyproject.toml constraints/tl-3.9.txt
	$(call install,$(ENV_3.9),3.9,dev)

$(ENV_2.18)/.ready: pyproject.toml constraints/tl-2.18.txt
	$(call install,$(ENV_2.18),2.18,test)

$(ENV_4.3)/.ready: pyproject.toml constraints/tl-4.3.txt
	$(call install,$(ENV_4.3),4.3,test)

# The onset study: hours on two cores; goes on where it was interrupted. `make study-page` makes the page of what is stored.
STUDY := studies/onset
WRITTEN := --page $(STUDY)/RESULTS.md --departures $(STUDY)/departures.md

study: $(ENV_3.9)/.ready
	HF_HUB_OFFLINE=1 $(ENV_3.9)/bin/iglens study $(STUDY)/prompts.jsonl --reference $(STUDY)/reference.jsonl \
		--out $(STUDY)/run --save $(STUDY)/results.parquet $(WRITTEN)

study-page: $(ENV_3.9)/.ready
	$(ENV_3.9)/bin/iglens study --out $(STUDY)/results.parquet $(WRITTEN)

# Some half an hour on a quiet machine (Linux). `make bench-table` writes the README's table from the stored results.
bench: $(ENV_3.9)/.ready $(ENV_4.3)/.ready
	$(ENV_3.9)/bin/python -m pip install -q -c constraints/tl-3.9.txt pyperf memray
	$(ENV_4.3)/bin/python -m pip install -q -c constraints/tl-4.3.txt pyperf
	HF_HUB_OFFLINE=1 $(ENV_3.9)/bin/python -W ignore -m benchmarks.readout
	HF_HUB_OFFLINE=1 $(ENV_4.3)/bin/python -W ignore -m benchmarks.neighbours
	HF_HUB_OFFLINE=1 $(ENV_3.9)/bin/python -W ignore -m benchmarks.dataset
	$(MAKE) bench-table

bench-table: $(ENV_3.9)/.ready
	$(ENV_3.9)/bin/python -m benchmarks.table --readme

# The README's pictures, drawn by Chrome or Chromium.
pictures: $(ENV_3.9)/.ready
	$(ENV_3.9)/bin/python docs/make_pictures.py

# Run the notebooks and store what they show; the pictures are drawn by Chrome or Chromium.
notebooks: $(ENV_3.9)/.ready
	$(ENV_3.9)/bin/python -W ignore notebooks/run.py

clean:
	rm -rf .venv .venvs .pytest_cache .ruff_cache .hypothesis build dist
