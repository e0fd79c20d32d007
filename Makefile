# make help lists the targets. Everything runs in .venv, which is made on first use.
PYTHON ?= python3
BIN := .venv/bin
# With it each of the hundred processes that tests start would compile all files again.
unexport PYTHONDONTWRITEBYTECODE
# Overrides for train, e.g. make train ARGS="trainer.max_steps=200 seed=2"
ARGS ?=
# Put a file between two marks of a page: $(call into_page,page,mark,file)
into_page = $(BIN)/python -c "import re, pathlib as p; r = p.Path('$(1)'); t = p.Path('$(3)').read_text(); \
	r.write_text(re.sub(r'(<!-- $(2) -->\n).*?(<!-- end of $(2))', lambda m: m[1] + t + m[2], r.read_text(), flags=re.S))"

CARD := src/qnmixer/weights/qn_mixer_256_64views.md

.DEFAULT_GOAL := help
.PHONY: help install lock train compare test test-all test-gpu lint site notebooks dist release bench readme real picture symmetric \
	task robustness second-order results levers clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /	/' | expand -t 12

# The build of torch: cu130, cu126 or cpu. auto: chosen by the GPUs. Empty: that of .venv, else chosen by the GPUs.
TORCH ?=
install: .venv/.installed ## make .venv and install everything into it; TORCH=cu130|cu126|cpu names the build of torch

ifneq ($(TORCH),)
.PHONY: .venv/.installed
endif
.venv/.installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
		{ echo "error: Python 3.11 to 3.14 is needed, $(PYTHON) is another: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@[ -x $(BIN)/python ] || if command -v uv >/dev/null; then uv venv --quiet --seed --python $(PYTHON) .venv; else $(PYTHON) -m venv .venv; fi
	@echo "Installing into .venv: minutes, and 2 GB (with CUDA 6 GB)"
	@$(BIN)/python -I src/qnmixer/torch_builds.py "$(TORCH)"
	@touch $@

lock: ## write requirements.lock from pyproject.toml, with uv; LOCK=--upgrade takes newer versions
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes --quiet \
		--custom-compile-command "make lock" --output-file requirements.lock $(LOCK)

train: install ## train the demo (minutes, no data needed), then evaluate it
	$(BIN)/python -m qnmixer.train experiment=demo $(ARGS)

# On phantoms; on your slices: make compare CT=/path/to/dicom.
# Another experiment: make compare EXPERIMENT=ablation_qn; other slices or noise for the test: COMPARE="noise=field"
EXPERIMENT ?= $(if $(CT),compare_real,compare_small)
OF_CT := $(if $(CT),data.sources.slices.root=$(CT))
SWEEP ?= runs/$(EXPERIMENT)
# Two at once without a GPU: small networks leave half of two cores idle (JOBS= for one at a time, as for large ones)
JOBS ?= $(if $(findstring launcher,$(ARGS))$(shell command -v nvidia-smi),,2)
compare: install ## train all methods, small, then write tables, pictures and page; CT=/path/to/dicom: on real slices
	@$(BIN)/python -m qnmixer.train -m --config-dir notebooks/studies experiment=$(EXPERIMENT) hydra.sweep.dir=$(SWEEP) $(JOBS:%=hydra.launcher.jobs_at_once=%) $(OF_CT) $(ARGS); \
	code=$$?; \
	if [ $$code -lt 128 ] && [ -e $(SWEEP)/sweep.json ]; then \
		$(BIN)/python -m qnmixer.compare sweep=$(SWEEP) $(COMPARE) || code=$$?; \
	fi; exit $$code

# Three at once on two cores: some tests wait for processes that end, or for a network that is not there.
test: install ## run the tests, but not the long ones; e.g. TESTS=tests/models
	$(BIN)/python -m pytest -n 3 --dist loadgroup -rfE --disable-warnings -m "not long" $(TESTS)

test-all: install ## run all tests
	$(BIN)/python -m pytest -n 3 --dist loadgroup $(TESTS)

test-gpu: install ## test this machine's GPU in minutes; writes bench/gpu.md
	QNMIXER_GPU_RESULTS=bench/gpu.md $(BIN)/python -m pytest -m cuda -rs $(TESTS); code=$$?; \
	[ ! -e bench/gpu.md ] || cat bench/gpu.md; exit $$code

lint: install ## check style, types, and imports between packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two phantoms are evaluated for its gallery. The address of the repository is in docs/site/mkdocs.yml.
site: install ## build the website into build/site, without a network
	rm -rf build/gallery
	$(BIN)/python -m qnmixer.evaluate run=pretrained data=phantoms data.n_test=2 noise=field accelerator=cpu \
		evaluation.n_pictures=2 hydra.run.dir=build/gallery
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --config-file docs/site/mkdocs.yml

notebooks: install ## run the notebooks, without a browser, into build/notebooks
	$(BIN)/python -m nbconvert --to notebook --execute --output-dir build/notebooks notebooks/*.ipynb

dist: install ## build the packages into dist, check them, and try the wheel outside of this folder
	$(BIN)/python .ci/release.py dist

release: install ## write VERSION into its files, commit and tag it: make release VERSION=0.2.0
	@$(BIN)/python .ci/release.py release "$(VERSION)"

# It looks for deepinv and ASTRA, as installed by: pip install -e ".[bench]" && pip install --no-deps deepinv
bench: install ## our operator beside deepinv's and ASTRA's, steps of QN-Mixer, and their memory beside the plan: bench/bench.md
	mkdir -p bench
	$(BIN)/python notebooks/benchmarks/bench_step.py > bench/bench.md
	$(BIN)/python notebooks/benchmarks/bench_memory.py >> bench/bench.md
	cat bench/bench.md

readme: install ## run the demo and put its table and picture into README.md
	rm -rf runs/readme
	$(BIN)/python -m qnmixer.train experiment=demo evaluation.n_pictures=1 hydra.run.dir=runs/readme $(ARGS)
	cp runs/readme/evaluation/picture.png notebooks/demo.png
	$(call into_page,README.md,table,runs/readme/evaluation/table.md)

# CT has a folder of slices for each patient: DICOM, or .npy with DATA=numpy. SPLIT says who is for validation and who for the test:
# "data.split=explicit data.val_patients=[…] data.test_patients=[…]". Without it all patients are tested.
DATA ?= dicom
OF_PATIENTS = data=$(DATA) data.root=$(CT) $(SPLIT) data.simulation_factor=2 noise=field
real: install ## compare run=pretrained with total variation over the patients in CT=/path/to/patients, for README.md
	rm -rf runs/real
	$(BIN)/python -m qnmixer.evaluate run=pretrained $(OF_PATIENTS) evaluation.tv_weight=9e-5 symmetries=8 \
		hydra.run.dir=runs/real $(ARGS)
	$(BIN)/python notebooks/studies/patients.py runs/real > runs/real/patients.md
	$(call into_page,README.md,real,runs/real/patients.md)

# The README shows TotalSegmentator's test case (Apache-2.0): CT is a folder with its 20 DICOM files.
picture: install ## reconstruct the one patient in CT=/path/to/dicom, for the picture of README.md and the card
	rm -rf runs/picture
	$(BIN)/python -m qnmixer.evaluate run=pretrained data=dicom data.root=$(CT) data.simulation_factor=2 noise=field \
		evaluation.tv_weight=9e-5 evaluation.n_pictures=1 hydra.run.dir=runs/picture
	cp runs/picture/picture.png notebooks/real_ct.png
	$(call into_page,$(CARD),one_patient,runs/picture/table.md)

# The factors of the spread are chosen on the validation patients and tested on the test patients.
symmetric: install ## the mean over turns and flips of run=pretrained and its spread, for its card: CT, DATA, SPLIT as in make real
	rm -rf runs/symmetric_mean runs/uncertainty
	$(BIN)/python -m qnmixer.evaluate run=pretrained $(OF_PATIENTS) split=val symmetries=8 evaluation.first_order=true \
		hydra.run.dir=runs/symmetric_mean
	$(BIN)/python -m qnmixer.evaluate run=pretrained $(OF_PATIENTS) evaluation=uncertainty symmetries=8 hydra.run.dir=runs/uncertainty
	$(call into_page,$(CARD),symmetric,runs/symmetric_mean/table.md)
	$(call into_page,$(CARD),uncertainty,runs/uncertainty/table.md)
	cp runs/uncertainty/uncertainty.json src/qnmixer/weights/qn_mixer_256_64views.uncertainty.json

# On phantoms. A quarter of an hour of one CPU core. CARD shows the table and the picture.
task: install ## what can be found in the images of run=pretrained, for its card
	rm -rf runs/task
	$(BIN)/python -m qnmixer.evaluate run=pretrained evaluation=task accelerator=cpu hydra.run.dir=runs/task
	cp runs/task/picture.png notebooks/results/task.png
	$(call into_page,$(CARD),task,runs/task/table.md)

N_SLICES ?= 5
robustness: install ## how far run=pretrained can be trusted, for its card: CT, DATA, SPLIT as in make real; 20 minutes of a CPU core
	rm -rf runs/robustness
	$(BIN)/python -m qnmixer.robustness run=pretrained $(OF_PATIENTS) noises=[none,physical] n_slices=$(N_SLICES) accelerator=cpu \
		logger=csv hydra.run.dir=runs/robustness $(ARGS)
	cp runs/robustness/robustness.png notebooks/results/robustness.png
	$(call into_page,$(CARD),robustness,runs/robustness/table.md)

# SWEEPS: those of experiment=data_term, after qnmixer.compare sweep=DIR for each
second-order: install ## the table of experiment=data_term: make second-order SWEEPS="runs/data_term runs/data_term_4"
	$(BIN)/python notebooks/studies/data_term.py $(SWEEPS) > runs/data_term.md
	cp runs/data_term.md notebooks/results/data_term.md

results: install ## copy the tables of make compare, bench and test-gpu into notebooks/results
	mkdir -p notebooks/results
	for table in bench gpu; do [ ! -e bench/$$table.md ] || cp bench/$$table.md notebooks/results/; done
	[ ! -e $(SWEEP)/comparison ] || cp $(SWEEP)/comparison/comparison.md notebooks/results/$(EXPERIMENT).md
	[ "$(EXPERIMENT)" != compare_real ] || [ ! -e $(SWEEP)/comparison ] || { \
		sed -n '/^| method/,/^$$/{p;/^$$/q}' $(SWEEP)/comparison/comparison.md | grep '^|' > compare.md; \
		$(call into_page,docs/compare.md,compare_real,compare.md); rm compare.md; }
	[ "$(EXPERIMENT)" != compare_small ] || [ ! -e $(SWEEP)/comparison ] || \
		cp $(SWEEP)/comparison/comparison.png notebooks/results/compare_small.png

levers: install ## write the table of memory levers into docs/memory.md
	$(BIN)/python -m qnmixer.plan format=levers data.batch_size=4 > levers.md
	$(call into_page,docs/memory.md,levers,levers.md)
	rm levers.md

clean: ## remove .venv and caches; runs stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist src/*.egg-info
