//! Shared part of the fuzz tests: byte strings decoded as calls, the corpus, and the time limit.
//!
//! Every byte string is valid. `tests/fuzz/<name>.txt` holds hexadecimal lines: past failures and
//! inputs with high coverage. They run first; then proptest creates inputs until the time is up,
//! and shrinks a failure to a line for the corpus. VMMGRAPH_FUZZ_SECONDS sets the time, by default
//! 5 seconds.
//!
//! A crash leaves its input in `fuzz-<name>.txt` in cargo's folder for temporary files.

use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestError, TestRunner};

/// The input, read from the front; zeros follow its end.
pub(crate) struct Input<'a>(&'a [u8]);

impl Input<'_> {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n.max(1)
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    pub(crate) fn number(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn bytes(line: &str) -> Vec<u8> {
    assert!(line.len().is_multiple_of(2), "half a byte: {line}");
    let digits =
        |at| u8::from_str_radix(&line[at..at + 2], 16).unwrap_or_else(|_| panic!("not hexadecimal: {line}"));
    (0..line.len()).step_by(2).map(digits).collect()
}

/// Runs the corpus and then new inputs until the time is up.
pub(crate) fn fuzz(name: &str, run: impl Fn(&mut Input)) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fuzz/{name}.txt"));
    let text = std::fs::read_to_string(&corpus).unwrap();
    let last = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}.txt"));
    let known = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mut inputs = 0u64;
    for line in known {
        inputs += 1;
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(&mut Input(&bytes(line))))) {
            eprintln!("known input {line}");
            resume_unwind(panic);
        }
    }
    assert!(inputs > 0, "{} is empty", corpus.display());

    let seconds =
        std::env::var("VMMGRAPH_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5.0);
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let known = inputs;
    let count = std::cell::Cell::new(0u64);
    while Instant::now() < until {
        let config =
            Config { cases: 50, failure_persistence: None, max_shrink_iters: 4000, ..Config::default() };
        let strategy = prop_oneof![
            4 => proptest::collection::vec(any::<u8>(), 0..500),
            // Few different bytes: repeated calls.
            1 => proptest::collection::vec(0u8..24, 0..500),
        ];
        let result = TestRunner::new(config).run(&strategy, |input| {
            count.set(count.get() + 1);
            let _ = std::fs::write(&last, hex(&input));
            run(&mut Input(&input));
            Ok(())
        });
        match result {
            Ok(()) => {}
            Err(TestError::Fail(why, input)) => {
                panic!("{why}\nadd to tests/fuzz/{name}.txt:\n{}", hex(&input))
            }
            Err(TestError::Abort(why)) => panic!("{why}"),
        }
    }
    println!("{name}: {known} known and {} new inputs", count.get());
    assert!(count.get() > 20 || seconds < 1.0, "only {} inputs in {seconds} s", count.get());
}
