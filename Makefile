# make demo and make test need the Rust toolchain and make; scripts/setup.sh installs missing tools.

.PHONY: demo test docs wheel torch-matrix header bench elastic format ci ci-full gpu-build clean

demo: ## captures of real models on the available driver: a GPU, or else host memory
	@scripts/setup.sh demo
	cargo build --locked --release --quiet -p vmmgraph-demo
	@# Not cargo run: its library path may contain the tests' stand-in for libcuda.
	target/release/vmmgraph-demo --json build/demo.json

test: ## all tests without a GPU: Rust, C, C++, the installed package
	@scripts/setup.sh test
	scripts/test.sh

docs: ## the documentation site in build/site, with the reference of C, C++, Python and Rust
	@scripts/setup.sh docs
	@rm -rf build/docs build/site && mkdir -p build && cp -r docs build/docs
	scripts/reference.py build/docs
	MDBOOK_BOOK__SRC=build/docs .tools/bin/mdbook build
	cargo doc --locked --no-deps --quiet
	@cp -r target/doc build/site/rust
	scripts/site.py build/site

wheel: ## a Python wheel in build/wheels for all torch releases, or RELEASES="2.10 2.11-cu13"
	@scripts/setup.sh wheel
	scripts/wheel.sh $(RELEASES)

torch-matrix: ## compiles cpp/torch against every supported torch release and the newest one
	@scripts/setup.sh test
	tests/torch/matrix.sh

header: ## regenerates include/vmmgraph/vmmgraph.h after a change in src/capi
	UPDATE_EXPECT=1 cargo test --locked -p vmmgraph-header

bench: ## host time of spaces and blocks, checked against limits
	cargo bench --locked -p vmmgraph-benches

elastic: ## policies of elastic memory under simulated traffic: docs/elastic.md
	@mkdir -p build
	cargo run --locked --release -p vmmgraph-elastic-sim -- --seconds 120 --svg docs/elastic.svg --table build/elastic.md --json build/elastic.json

format: ## rustfmt, clang-format (all but the generated header) and ruff
	@scripts/setup.sh test
	cargo fmt --all
	git ls-files -z '*.cpp' '*.hpp' '*.h' '*.c' ':!include/vmmgraph/vmmgraph.h' | xargs -0 .venv/bin/clang-format -i
	git ls-files -z '*.py' | xargs -0 .venv/bin/ruff format --quiet

ci: ## all checks of CI
	.ci/run

ci-full: ## before a release, after ci: every torch release, sanitizers, other platforms, long fuzzing
	.ci/full

gpu-build: ## collects the files scripts/gpu.sh needs on a GPU machine
	@scripts/setup.sh test
	scripts/gpu.sh build

clean:
	rm -rf build target
