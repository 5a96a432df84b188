# Thin on purpose: what is needed comes from scripts/setup.sh, what is done from cargo and
# `cargo xtask`, so that everything can also be run without make.

CARGO   := scripts/cargo
PREFIX  ?= /usr/local
DESTDIR ?=
DEST    := $(DESTDIR)$(PREFIX)
TARGET  := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release
KSF     := $(RELEASE)/ksf
# One set of packages for all targets: another set means other features, and cargo builds the dependencies again.
BUILD   := $(CARGO) build --release --locked -p ksf-cli -p ksf-kcm-preload -p ksf-preload -p libksf -p xtask
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
BASH    := $(DEST)/share/bash-completion/completions
ZSH     := $(DEST)/share/zsh/site-functions
FISH    := $(DEST)/share/fish/vendor_completions.d
UNITS   := $(DEST)/lib/systemd/system

.DEFAULT_GOAL := help
.PHONY: help demo check test soak fuzz bench build install fmt

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build ## Run every service on every engine of this machine, show one table; kill and audit a store
	@$(RELEASE)/xtask demo

check: ## Check format and lints, run the tests that start no server
	@scripts/setup.sh test
	@scripts/test.sh check

test: ## Run every test, start every row of the bench for a moment
	@scripts/setup.sh test
	@scripts/test.sh test

soak: ## Run every test and the long ones (all seeds, mutants, machines), then the tests ten times (hours)
	@scripts/setup.sh test
	@scripts/test.sh soak

fuzz: ## Run each fuzz target under libFuzzer for SECONDS (60)
	@scripts/setup.sh demo
	@scripts/fuzz.sh $(or $(SECONDS),60)

bench: ## Measure against the peers, write a report to bench/results
	@scripts/setup.sh bench
	$(BUILD)
	@$(RELEASE)/xtask bench

build:
	@scripts/setup.sh demo
	$(BUILD)

install: build ## Install into PREFIX (/usr/local)
	install -D -m 755 $(KSF) $(DEST)/bin/ksf
	for name in kecho krpc2 echotest rpctest; do ln -sf ksf $(DEST)/bin/$$name; done
	install -d $(DEST)/share/man/man1
	$(KSF) man --dir $(DEST)/share/man/man1
	install -d $(BASH) $(ZSH) $(FISH)
	$(KSF) completions bash > $(BASH)/ksf
	$(KSF) completions zsh > $(ZSH)/_ksf
	$(KSF) completions fish > $(FISH)/ksf.fish
	install -d $(UNITS)
	sed 's,/usr/local/,$(PREFIX)/,' packaging/ksf.service > $(UNITS)/ksf.service
	install -D -m 644 packaging/ksf.socket $(UNITS)/ksf.socket
	install -D -m 644 packaging/ksf.toml $(DEST)/share/ksf/ksf.toml
	$(KSF) sdk --dir $(DEST)/include/ksf
	install -d $(DEST)/lib/pkgconfig $(DEST)/lib/ksf
	scripts/link-libksf.sh $(RELEASE)/libksf_capi.a $(DEST)/lib
	install -m 644 crates/mux/libksf/include/ksf.h $(DEST)/include/ksf.h
	sed 's,@PREFIX@,$(PREFIX),; s,@VERSION@,$(VERSION),' packaging/libksf.pc.in > $(DEST)/lib/pkgconfig/libksf.pc
	install -D -m 644 packaging/man/libksf.3 $(DEST)/share/man/man3/libksf.3
	install -m 755 $(RELEASE)/libksf_kcm_preload.so $(DEST)/lib/ksf/libksf_kcm_preload.so
	install -m 755 $(RELEASE)/libksf_preload.so $(DEST)/lib/ksf/libksf_accel.so

fmt: ## Format the Rust code
	$(CARGO) fmt --all
