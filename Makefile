# The ways into this project. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup build test lint deny fuzz-check demo bench fuzz soak kills mutants install

TARGET := $(or $(CARGO_TARGET_DIR),target)
PROGRAM := $(TARGET)/release/lamina
PREFIX ?= /usr/local
DESTDIR ?=

help: ## What there is
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1 \t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## Install the tools that tests and measurements need (apt, idempotent)
	@scripts/setup

build: ## Build lamina as users run it
	cargo build --release -p lamina

test: ## Every test
	@scripts/setup guest clients
	@scripts/test $(TEST_ARGUMENTS)

lint: deny fuzz-check ## Format, clippy, fuzz targets and dependencies
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

# Known vulnerabilities are not part of it: their database is fetched from GitHub, and a build must not depend on
# that. `cargo deny check` without words, where there is a network, looks at them too.
deny: ## Licences, sources and versions of what is built in
	@scripts/setup deny
	@$(TARGET)/tools/bin/cargo-deny --log-level error check --hide-inclusion-graph bans licenses sources

# They are no part of the workspace: without this a change of an interface would break them unseen.
fuzz-check: ## Whether the fuzz targets build
	cargo check --quiet --locked --manifest-path fuzz/Cargo.toml --target-dir $(TARGET)/fuzz-check

demo: setup build ## A file system, snapshots and 100 clones on real files; a guest and 10 instant clones
	@scripts/demo $(PROGRAM)

bench: setup build ## Speed against the peers, and every other study; BENCH="speed --quick" for a part
	@scripts/setup guest
	cargo build --release -p lamina-study
	@$(TARGET)/release/lamina-study $(or $(BENCH),all)

FUZZ_SECONDS ?= 60
fuzz: setup ## Every fuzz target for FUZZ_SECONDS (60)
	@scripts/setup fuzz
	@scripts/fuzz $(FUZZ_SECONDS)

MODEL_STATES ?= 1000000
soak: ## Every order of steps to MODEL_STATES, then power cuts and schedules without end; prints the seed that fails
	LAMINA_MODEL_STATES=$(MODEL_STATES) cargo test --release -p lamina-store --lib no_order_of_steps -- --nocapture
	@scripts/soak $(SOAK)

KILLS ?= 1000
kills: ## A server killed with SIGKILL under load, KILLS times (1000); LAMINA_SEED for another seed
	LAMINA_KILLS=$(KILLS) cargo test --release -p lamina --test kill_load -- --nocapture

mutants: ## Deliberate faults, one at a time: which do the tests miss? MUTANTS="--only NAME" for a part
	cargo run -p lamina-mutants -- $(MUTANTS)

install: build ## Program, man pages, completions and unit into DESTDIR/PREFIX
	install -D -m 755 $(PROGRAM) $(DESTDIR)$(PREFIX)/bin/lamina
	$(PROGRAM) man $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/share/{bash-completion/completions,zsh/site-functions,fish/vendor_completions.d}
	$(PROGRAM) completion bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/lamina
	$(PROGRAM) completion zsh > $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_lamina
	$(PROGRAM) completion fish > $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/lamina.fish
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	install -m 644 packaging/*.service $(DESTDIR)$(PREFIX)/lib/systemd/system
