//! Tests that share one process: exclusion, and tests that run again in a child process.

use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Excludes all tests of the process that call this function, until the guard is dropped. Stand-ins
/// of vendors' libraries and the log sink are process-wide.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // A failed test must not fail the rest.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a command that runs one test of the calling module in a child process.
#[macro_export]
macro_rules! child {
    ($test:expr) => {
        $crate::child_command(module_path!(), $test)
    };
}

/// See [`child!`].
pub fn child_command(module: &str, test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    // The name of a test does not begin with the name of its program.
    let name = match module.split_once("::") {
        Some((_, module)) => format!("{module}::{test}"),
        None => test.to_owned(),
    };
    command.args(["--exact", &name, "--nocapture"]);
    command
}
