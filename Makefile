# Two commands set everything up on a machine with Python and make:
#   make demo    emit Wan for 4 ranks, run it on 4 local CPU processes, compare with plain diffusers
#   make test    run the tests
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo example test check lint format table versions inferred emit bench bench-strategies clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[run,test]"
	@touch $(READY)

demo: $(READY)
	$(BIN)/cpgen emit --model WanTransformer3DModel --cp 4
	$(BIN)/cpgen diff wan_transformer_3d --upstream | grep "cpgen:" || true
	$(BIN)/cpgen verify wan_transformer_3d

# Train a small Wan on clips of pictures, export it, and sample in diffusers' pipeline: some minutes.
example: export OMP_NUM_THREADS = 1
example: $(READY)
	$(BIN)/cpgen emit --model WanTransformer3DModel --cp 2
	$(BIN)/python examples/prepare_wan.py
	$(BIN)/torchrun --nproc-per-node 4 examples/train_wan.py
	$(BIN)/cpgen export runs/wan/checkpoints --to runs/wan/exported --force
	$(BIN)/python examples/sample_wan.py

test: $(READY)
	$(BIN)/python -m pytest -q

# What CI runs besides the tests.
check: lint
	$(BIN)/cpgen check --all

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Verify the shipped plans that are not proven yet as they stand (cp 2 and 4, two strategies), record what came out in
# plans/proofs.json, and write it into README.md and docs/models.md. Can be stopped, and goes on where it was.
table: $(READY)
	$(BIN)/python -m tools.prove; status=$$?; $(BIN)/python -m tools.tables && exit $$status

# The same for seven plans, on the newest patch release of each of the last five minor versions of diffusers.
versions: $(READY)
	$(BIN)/python -m tools.prove --versions; status=$$?; $(BIN)/python -m tools.tables && exit $$status

# See for which classes `cpgen plan infer` finds the plan by itself: docs/models.md.
inferred: $(READY)
	$(BIN)/python -m tools.inferred

# Emit every package under generated/ again, as its manifest says.
emit: $(READY)
	$(BIN)/cpgen emit --all

bench: $(READY)
	$(BIN)/python benchmarks/commands.py

# Count and time the strategies on local ranks, and put the tables into docs/strategies.md.
bench-strategies: $(READY)
	$(BIN)/python -m benchmarks.strategies --write docs/strategies.md

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
