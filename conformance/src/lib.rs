//! Conformance suite: VmmGraph's requirements of every platform, as cases over the driver interface
//! ([`vmmgraph::driver::Driver`]).
//!
//! A driver passes a case, fails it, or does not offer it according to its
//! [`Capabilities`](vmmgraph::driver::Capabilities). No case knows the platform. The caller
//! supplies captures as a [`Plug`], or the capture cases are not offered.
//!
//! The device should be idle: the suite compares its free memory and briefly allocates all of it.

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

/// Devices and capture functions under test.
pub struct Subject<'p> {
    /// The device.
    pub driver: SharedDriver,
    /// A second device of the same platform.
    pub other: Option<SharedDriver>,
    /// Capture functions.
    pub plug: Option<&'p dyn Plug>,
}

/// Reason for not passing a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The platform does not offer the feature; the reason.
    NotOffered(String),
    /// The platform violates the requirement; the observation.
    Failed(String),
}

pub(crate) type Verdict = Result<(), Stop>;

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error.to_string())
    }
}

/// One requirement of the library.
#[derive(Clone, Copy)]
pub struct Case {
    /// Stable name: tables from different machines are compared by name.
    pub name: &'static str,
    /// The requirement.
    pub relies_on: &'static str,
    run: fn(&Subject, &Ground) -> Verdict,
}

/// Outcome of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The requirement holds.
    Passed,
    /// The requirement is violated.
    Failed,
    /// The platform does not offer the feature.
    NotOffered,
}

/// Result of one executed case.
#[derive(Clone, Debug)]
pub struct Row {
    /// Name of the case.
    pub name: &'static str,
    /// Outcome of the case.
    pub outcome: Outcome,
    /// The observation, or the reason for not offering; empty if passed.
    pub note: String,
    /// Duration of the case.
    pub took: Duration,
}

/// Runs all cases in order; continues after failures.
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
