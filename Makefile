# The tasks of a developer. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup build test lint deny fuzz-check demo bench fuzz soak kills mutants install

TARGET := $(or $(CARGO_TARGET_DIR),target)
PROGRAM := $(TARGET)/release/lamina
PREFIX ?= /usr/local
DESTDIR ?=

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1 \t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## Install the tools that tests and measurements need (apt, idempotent)
	@scripts/setup

build: ## Build lamina as users run it
	cargo build --release -p lamina

test: setup ## Run every test
	@scripts/test $(TEST_ARGUMENTS)

lint: deny fuzz-check ## Check the format, clippy, fuzz targets and dependencies
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

# Known vulnerabilities are not checked: their database is fetched from GitHub, and a build must not depend on a
# download. `cargo deny check` without arguments checks vulnerabilities too, and needs a network.
deny: ## Check licences, sources and versions of the dependencies
	@scripts/setup deny
	@$(TARGET)/tools/bin/cargo-deny --log-level error check --hide-inclusion-graph bans licenses sources

# The fuzz targets are not in the workspace: without this target, no check finds that a changed interface breaks them.
fuzz-check: ## Check that the fuzz targets build
	cargo check --quiet --locked --manifest-path fuzz/Cargo.toml --target-dir $(TARGET)/fuzz-check

demo: setup build ## Show a file system, snapshots and 100 clones on real files; a guest and 10 instant clones
	@scripts/demo $(PROGRAM)

bench: setup build ## Measure speed against other programs, and run every other study; BENCH="speed --quick" for a part
	@scripts/setup guest
	@case "$(or $(BENCH),all)" in *desktops* | *all*) [ "$$(id -u)" != 0 ] || scripts/setup desktops ;; esac
	cargo build --release -p lamina-study
	@$(TARGET)/release/lamina-study $(or $(BENCH),all)

FUZZ_SECONDS ?= 60
fuzz: setup ## Run every fuzz target for FUZZ_SECONDS (60)
	@scripts/setup fuzz
	@scripts/fuzz $(FUZZ_SECONDS)

soak: ## Simulate power cuts, schedules and damaged images, and explore the model, until stopped; prints a failing seed
	@scripts/soak $(SOAK)

KILLS ?= 1000
kills: ## Kill a server with SIGKILL under load, KILLS times (1000); LAMINA_SEED for another seed
	LAMINA_KILLS=$(KILLS) cargo test --release -p lamina --test kill_load -- --nocapture

mutants: ## Switch on deliberate faults one at a time, to find faults that tests miss; MUTANTS="--only NAME" for a part
	@scripts/setup s3
	cargo run -p lamina-mutants -- $(MUTANTS)

install: build ## Install program, man pages, completions and unit into DESTDIR/PREFIX
	install -D -m 755 $(PROGRAM) $(DESTDIR)$(PREFIX)/bin/lamina
	$(PROGRAM) man $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/share/{bash-completion/completions,zsh/site-functions,fish/vendor_completions.d}
	$(PROGRAM) completion bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/lamina
	$(PROGRAM) completion zsh > $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_lamina
	$(PROGRAM) completion fish > $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/lamina.fish
	install -D -m 755 packaging/qemu-reconnect $(DESTDIR)$(PREFIX)/lib/lamina/qemu-reconnect
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	for unit in packaging/*.service; do \
	    sed 's,/usr/bin/lamina,$(PREFIX)/bin/lamina,' "$$unit" > "$(DESTDIR)$(PREFIX)/lib/systemd/system/$${unit#packaging/}"; \
	done
