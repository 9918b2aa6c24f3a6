# Each command works on a fresh machine: it creates .venv, installs what it needs, builds, and runs.
#
# A stamp file in .venv/stamps records that a step is done. Its date is the start of the step, and it is put in place at
# the end: an interrupted step runs again, and a file changed meanwhile counts as newer. A lock serializes two makes.

PYTHON ?= python3
FUZZ_SECONDS ?= 60
BIN := .venv/bin
STAMPS := .venv/stamps
PEERS := .venv-bench/bin
PEER_STAMPS := .venv-bench/stamps
# Of the wheel: this machine's, or one that rustup has added.
TARGET ?= $(shell uname -m)-unknown-linux-gnu
TAG := manylinux_2_28

# maturin takes the interpreter from VIRTUAL_ENV and refuses to run if CONDA_PREFIX is set as well.
export VIRTUAL_ENV := $(CURDIR)/.venv
unexport CONDA_PREFIX
# The tests start hundreds of processes; without .pyc files each would compile every module.
unexport PYTHONDONTWRITEBYTECODE

# Folders are listed because a folder's date changes when a file is added or removed.
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -type d -o -name '*.rs' -o -name Cargo.toml)
CORE_TESTS := --features tundish-commit/failpoints
PYTHON_FOLDERS := python tests benches examples .ci
# Where `.ci/vocabulary.txt` holds.
SPELLED := README.md CHANGELOG.md CITATION.cff CONTRIBUTING.md SECURITY.md Makefile mkdocs.yml Cargo.toml pyproject.toml clippy.toml deny.toml .ci/run rust fuzz/fuzz_targets docs $(PYTHON_FOLDERS)
# One more than there are processors, because tests wait at times. pytest uses at most 4 processes, to limit memory.
TESTS_AT_ONCE := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))

.NOTPARALLEL:
.PHONY: help demo test soak bench lint docs wheel release-check fuzz audit tools

help:
	@echo 'make demo    pack real text, train a small model on it on two ranks, save and resume'
	@echo 'make test    every test, in Rust and in Python'
	@echo 'make soak    long forms of the tests: kills, full disks, power cuts, all pairs, random cases (hours)'
	@echo 'make bench   Rust benches, then tundish beside its peers; writes benches/RESULTS.md'
	@echo 'make lint    formats, lints, types, stubs, import layers, circles of Rust modules, layout, vocabulary'
	@echo 'make docs    build the site into out/site, and refuse a broken link'
	@echo 'make wheel   build one wheel for every Python from 3.11 on, and the source distribution, into dist/'
	@echo 'make release-check   install the wheel into clean environments, and use every part there'
	@echo 'make fuzz    fuzz plan folders, requests and shard headers, FUZZ_SECONDS each'
	@echo 'make audit   licences, sources and known vulnerabilities of the Rust dependencies'

demo: $(STAMPS)/with-examples
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_packed.py --out out/demo

# A Rust test that cannot run on this machine passes, and writes the reason into this file.
test: export TUNDISH_TEST_SKIPS := $(CURDIR)/.venv/skipped-tests
test: $(STAMPS)/with-test
	@: >"$$TUNDISH_TEST_SKIPS"
	@trap 'sort "$$TUNDISH_TEST_SKIPS"' EXIT; \
	if cargo nextest --version >/dev/null 2>&1; then \
	    set -x; cargo nextest run $(CORE_TESTS) --final-status-level skip --test-threads $(TESTS_AT_ONCE); \
	else \
	    set -x; cargo test --lib --bins --tests $(CORE_TESTS); \
	fi
	cargo test --doc $(CORE_TESTS)
	$(BIN)/python -m pytest --numprocesses $(TESTS_AT_ONCE) --maxprocesses 4 --dist worksteal

soak: export TUNDISH_SOAK := 1
soak: $(STAMPS)/with-test
	cargo test --test power_cut --package tundish-commit $(CORE_TESTS)
	cargo test --test task_queue_processes --test task_queue_model --package tundish-shm
	$(BIN)/python -m pytest --maxprocesses 4 --numprocesses $(TESTS_AT_ONCE) --dist worksteal

lint: $(STAMPS)/with-lint
	@# mypy takes as long as all other checks together, so it runs beside them. The fuzz targets are checked without
	@# libFuzzer, which would need a C++ compiler.
	@$(BIN)/mypy & types=$$!; trap 'kill $$types 2>/dev/null || :' EXIT; set -ex; \
	cargo fmt --all --check; \
	cargo fmt --manifest-path fuzz/Cargo.toml --check; \
	cargo clippy --locked --workspace --all-targets -- -D warnings; \
	cargo clippy --locked --workspace --all-targets $(CORE_TESTS) -- -D warnings; \
	cargo clippy --locked --manifest-path fuzz/Cargo.toml --no-default-features -- -D warnings; \
	$(BIN)/ruff format --check $(PYTHON_FOLDERS); \
	$(BIN)/ruff check $(PYTHON_FOLDERS); \
	$(BIN)/codespell $(SPELLED); \
	$(BIN)/lint-imports .ci/import-contracts.toml --no-cache; \
	$(BIN)/python .ci/rust_cycles.py; \
	$(BIN)/python .ci/layout.py; \
	$(BIN)/python .ci/test_times.py; \
	$(BIN)/python .ci/words.py; \
	$(BIN)/python -m mypy.stubtest --mypy-config-file stubtest.ini tundish._native; \
	wait $$types

docs: $(STAMPS)/with-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean

# The libraries of the machine that builds do not matter: zig links against glibc 2.28, and maturin checks that the wheel
# needs no newer symbols and no other libraries.
wheel: $(STAMPS)/zig
	@test -d "$$(rustc --print target-libdir --target $(TARGET))" \
	    || $(call complain,rustc cannot build for $(TARGET): run \`rustup target add $(TARGET)\`)
	rm -f dist/tundish-*_$(firstword $(subst -, ,$(TARGET))).whl dist/tundish-*.tar.gz
	@# maturin finds zig as a module of the Python on PATH.
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/maturin build --release --locked --zig --compatibility $(TAG) --target $(TARGET) --out dist
	$(BIN)/maturin sdist --out dist

release-check: wheel
	$(PYTHON) .ci/release_check.py dist

bench: wheel $(PEER_STAMPS)/peers
	cargo bench
	$(PEERS)/python -m pip install --quiet --no-deps --force-reinstall dist/tundish-*_$$(uname -m).whl
	$(PEERS)/python benches/peers/run.py

fuzz:
	$(call needs,cargo,$(RUST_HINT))
	@cargo fuzz --version >/dev/null 2>&1 || { echo 'make: cargo-fuzz is missing: run `cargo install cargo-fuzz --locked`' >&2; exit 1; }
	@# libFuzzer needs an unstable flag of rustc; RUSTC_BOOTSTRAP lets the stable compiler accept it.
	for target in load_plan requests shard_header; do \
	    RUSTC_BOOTSTRAP=1 cargo fuzz run $$target -- -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

audit:
	$(call needs,cargo,$(RUST_HINT))
	@cargo deny --version >/dev/null 2>&1 || { echo 'make: cargo-deny is missing: run `cargo install cargo-deny --locked`' >&2; exit 1; }
	cargo deny --locked check bans licenses sources
	cargo deny --locked check advisories

# ---- Environments ----

RUST_HINT := install Rust with rustup
RUST_LEAST := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
needs = @command -v $(1) >/dev/null 2>&1 || { echo 'make: $(1) is missing: $(2)' >&2; exit 1; }
complain = { echo "make: $(1)" >&2; exit 1; }
# The parent of a recipe's shell is make itself, so each of two makes has a date of its own.
begin = @mkdir -p $(@D) && touch $@.begun-$$PPID
end = @mv $@.begun-$$PPID $@

# The second of two makes waits for the environment. Without flock there is no lock.
locked = $(if $(FLOCK),$(FLOCK) $(1)/.lock )
FLOCK := $(shell command -v flock)

tools:
	$(call needs,$(PYTHON),run `apt-get install python3 python3-venv` or set PYTHON=)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || $(call complain,$(PYTHON) is $$($(PYTHON) --version 2>&1); tundish needs Python 3.11 or newer; set PYTHON=)
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	    || $(call complain,$(PYTHON) cannot make environments: run \`apt-get install python3-venv\`)
	$(call needs,cargo,$(RUST_HINT))
	$(call needs,rustc,$(RUST_HINT))
	@rustc=$$(rustc --version | cut -d ' ' -f 2); \
	    printf '%s\n' $(RUST_LEAST) "$$rustc" | sort -CV \
	    || $(call complain,rustc is $$rustc; tundish needs $(RUST_LEAST) or newer: run \`rustup update stable\`)
	$(call needs,cc,run `apt-get install build-essential`)

$(STAMPS)/maturin: | tools
	$(begin)
	$(call locked,.venv)$(PYTHON) -m venv .venv
	$(call locked,.venv)$(BIN)/python -m pip install --quiet --upgrade 'pip>=24' 'maturin>=1.9,<2'
	$(end)

$(STAMPS)/zig: $(STAMPS)/maturin
	$(begin)
	$(call locked,.venv)$(BIN)/python -m pip install --quiet 'maturin[zig]>=1.9,<2'
	$(end)

# The compiled module is in python/tundish, where `git clean` may have removed it. It is built in the profile of the Rust
# tests, so that each dependency is compiled once, and with the failpoints of the fault tests. `make wheel` and
# `make bench` build in the release profile, without failpoints.
$(STAMPS)/native: $(RUST_SOURCES) $(STAMPS)/maturin $(if $(wildcard python/tundish/_native*.so),,missing)
	$(begin)
	$(call locked,.venv)$(BIN)/maturin develop --skip-install --features failpoints
	$(end)

.PHONY: missing
missing:

$(STAMPS)/with-%: pyproject.toml $(STAMPS)/maturin | $(STAMPS)/native
	$(begin)
	@# Without these arguments, pip would build the module again, in the release profile.
	$(call locked,.venv)env MATURIN_PEP517_ARGS='--profile dev --features failpoints' $(BIN)/python -m pip install --no-build-isolation --editable '.[$*]'
	$(end)

$(PEER_STAMPS)/peers: benches/peers/requirements.txt benches/peers/requirements-alone.txt | tools
	$(begin)
	$(PYTHON) -m venv .venv-bench
	$(call locked,.venv-bench)$(PEERS)/python -m pip install --upgrade 'pip>=24' --requirement $<
	$(call locked,.venv-bench)$(PEERS)/python -m pip install --no-deps --requirement benches/peers/requirements-alone.txt
	$(end)
