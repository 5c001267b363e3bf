# `make demo` sets everything up and generates from the embedded sample; `make test` sets up and passes all tests.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-python test-kotlin test-swift lint clean

$(STAMP): pyproject.toml setup.py $(wildcard lesonnx/native/*.[ch] lesonnx/native/include/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@# Without a library the next call tries again: a compiler may be there by then.
	@if ls lesonnx/native/liblesonnx.* >/dev/null 2>&1; then touch $@; \
	else echo "note: the expert kernel is not built (no C compiler?): plain ONNX Runtime sessions compute instead"; fi

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/lesonnx demo

test: lint test-python test-kotlin test-swift

test-python: $(STAMP)
	$(BIN)/python -m pytest -n auto

# Bundles, and what the Python runner gives for them under the ONNX Runtime that Maven Central's library has.
KOTLIN_ONNXRUNTIME := $(shell sed -n 's|.*<onnxruntime.version>\(.*\)</.*|\1|p' android/lesonnx/pom.xml)

test-kotlin: $(STAMP)
	@skip() { echo "skipped: the Kotlin tests: $$1"; test -z "$$CI"; exit; }; \
	command -v mvn >/dev/null || skip "Maven is not here"; \
	command -v javac >/dev/null || skip "no JDK is here, 17 or later is needed"; \
	ls lesonnx/native/liblesonnx.* >/dev/null 2>&1 || skip "the expert kernel is not built"; \
	set -e; \
	$(BIN)/python tools/make_mobile_fixtures.py build/mobile --onnxruntime $(KOTLIN_ONNXRUNTIME); \
	mvn --batch-mode --quiet --file android/pom.xml test

# The Swift package with the ONNX Runtime that Python runs, and its models again with the one that its iOS package brings; what the
# sample app's screens show and do. The screens themselves need SwiftUI: they are parsed.
IOS_ONNXRUNTIME := $(shell sed -n 's/.*exact: "\([0-9.]*\)".*/\1/p' ios/Lesonnx/Package.swift)

test-swift: $(STAMP)
	@skip() { echo "skipped: the Swift tests: $$1"; test -z "$$CI"; exit; }; \
	test -n "$$CI" || tools/swift-linux.sh is-ready || skip "no Swift 6 is here; as root, tools/swift-linux.sh setup makes one"; \
	set -e; \
	$(BIN)/python tools/make_mobile_fixtures.py build/mobile --onnxruntime $(IOS_ONNXRUNTIME); \
	tools/swift-linux.sh test; \
	tools/swift-linux.sh exec swift test --package-path ../SampleApp/Models; \
	tools/swift-linux.sh exec sh -c 'swiftc -frontend -parse -swift-version 6 ../SampleApp/App/*.swift'; \
	LESONNX_ORT_VERSION=$(IOS_ONNXRUNTIME) tools/swift-linux.sh test --skip-build --filter RuntimeTests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/typing && ln -sfn ../../export build/typing/lesonnx_export
	$(BIN)/mypy -p lesonnx -p lesonnx_export

clean:
	rm -rf $(VENV) build demo *.egg-info .pytest_cache .mypy_cache .ruff_cache
