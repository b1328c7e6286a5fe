//! What VmmGraph relies on any platform to do, as cases over the one platform door ([`vmmgraph::driver::Driver`]).
//!
//! A driver passes a case, fails it, or does not offer what it is about, as its [`Capabilities`](vmmgraph::driver::Capabilities) say. No case knows which platform it runs
//! on. Captures are not behind the door: whoever runs the suite says how they are made ([`Plug`]), or those cases are not offered.
//!
//! A device under test should be idle: its free memory is compared, and used up for a moment.

use std::time::{Duration, Instant};

use vmmgraph::Error;
use vmmgraph::driver::SharedDriver;

mod cases;
mod ground;
mod plug;
mod report;

pub mod abi;
pub mod captures;

pub use cases::CASES;
pub use plug::{Launch, Plug};
pub use report::Report;

use ground::Ground;

/// What the suite runs on.
pub struct Subject<'p> {
    /// The device.
    pub driver: SharedDriver,
    /// Another device of the same platform.
    pub other: Option<SharedDriver>,
    /// How captures are made.
    pub plug: Option<&'p dyn Plug>,
}

/// Why a case did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The platform has no such thing, and does not say that it has; why.
    NotOffered(String),
    /// It does not do what the library relies on; what was found.
    Failed(String),
}

/// What a case says of itself.
pub(crate) type Verdict = Result<(), Stop>;

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error.to_string())
    }
}

/// One thing that the library relies on.
#[derive(Clone, Copy)]
pub struct Case {
    /// Its name, which is kept: tables from different machines are compared by it.
    pub name: &'static str,
    /// What the library relies on.
    pub relies_on: &'static str,
    run: fn(&Subject, &Ground) -> Verdict,
}

/// What became of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is so.
    Passed,
    /// It is not so.
    Failed,
    /// The platform does not offer it.
    NotOffered,
}

/// A case that was run.
#[derive(Clone, Debug)]
pub struct Row {
    /// The case's name.
    pub name: &'static str,
    /// What became of it.
    pub outcome: Outcome,
    /// What was found, or why it is not offered; empty if it passed.
    pub note: String,
    /// How long it took.
    pub took: Duration,
}

/// Runs every case, one after the other, and goes on past failures.
#[must_use]
pub fn run(subject: &Subject) -> Report {
    let mut report = Report::new(subject);
    report.rows.extend(CASES.iter().map(|case| case.run(subject)));
    report
}

impl Case {
    /// Runs this case.
    #[must_use]
    pub fn run(&self, subject: &Subject) -> Row {
        let start = Instant::now();
        let ground = Ground::new(&*subject.driver);
        let verdict = (self.run)(subject, &ground);
        let back = ground.give_back().map_err(|error| Stop::Failed(format!("giving back: {error}")));
        let (outcome, note) = match verdict.and(back) {
            Ok(()) => (Outcome::Passed, String::new()),
            Err(Stop::NotOffered(why)) => (Outcome::NotOffered, why),
            Err(Stop::Failed(found)) => (Outcome::Failed, found),
        };
        Row { name: self.name, outcome, note, took: start.elapsed() }
    }
}
