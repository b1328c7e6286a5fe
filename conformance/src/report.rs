//! Report of a run, as a text table and as JSON.

use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};
use vmmgraph::driver::{Capabilities, DeviceInfo};

use crate::{Outcome, Row, Subject};

/// Results of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// The device.
    pub info: DeviceInfo,
    /// Version of the driver, in its own format.
    pub version: String,
    /// Capabilities reported by the driver.
    pub capabilities: Capabilities,
    /// One row per case.
    pub rows: Vec<Row>,
}

impl Outcome {
    fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::NotOffered => "not offered",
        }
    }
}

impl Report {
    /// Makes a report of a device, without rows.
    #[must_use]
    pub fn new(subject: &Subject) -> Self {
        let driver = &subject.driver;
        Self {
            info: driver.info().clone(),
            version: driver.version(),
            capabilities: *driver.capabilities(),
            rows: Vec::new(),
        }
    }

    /// Number of cases with this outcome.
    #[must_use]
    pub fn count(&self, outcome: Outcome) -> usize {
        self.rows.iter().filter(|row| row.outcome == outcome).count()
    }

    /// Names of the cases with this outcome.
    #[must_use]
    pub fn names(&self, outcome: Outcome) -> Vec<&'static str> {
        self.rows.iter().filter(|row| row.outcome == outcome).map(|row| row.name).collect()
    }

    /// Total duration of all cases.
    #[must_use]
    pub fn took(&self) -> Duration {
        self.rows.iter().map(|row| row.took).sum()
    }

    fn capability_rows(&self) -> Vec<(&'static str, Value)> {
        let can = &self.capabilities;
        vec![
            ("granularity", json!(can.granularity)),
            ("largest_page", json!(can.largest_page)),
            ("largest_reservation", json!(can.largest_reservation)),
            ("alias", json!(format!("{:?}", can.alias))),
            ("alias_proven", json!(can.alias_proven)),
            ("map_in_any_order", json!(can.map_in_any_order)),
            ("map_while_capturing", json!(can.map_while_capturing)),
            ("replace_under_graph", json!(can.replace_under_graph)),
            ("unmap_waits", json!(can.unmap_waits)),
            ("unmap_each", json!(can.unmap_each)),
            ("descriptors_per_page", json!(can.descriptors_per_page)),
            ("register_host", json!(can.register_host)),
            ("peers", json!(can.peers.iter().collect::<Vec<_>>())),
            ("restores_no_context", json!(can.restores_no_context)),
        ]
    }

    /// The whole report as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        let cases: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                json!({
                    "name": row.name,
                    "outcome": row.outcome.word().to_lowercase(),
                    "note": row.note,
                    "seconds": row.took.as_secs_f64(),
                })
            })
            .collect();
        let capabilities: serde_json::Map<String, Value> =
            self.capability_rows().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        json!({
            "vmmgraph": env!("CARGO_PKG_VERSION"),
            "platform": self.info.platform,
            "device": self.info.ordinal,
            "name": self.info.name,
            "driver_version": self.version,
            "total_bytes": self.info.total_bytes,
            "capabilities": capabilities,
            "passed": self.count(Outcome::Passed),
            "failed": self.count(Outcome::Failed),
            "not_offered": self.count(Outcome::NotOffered),
            "seconds": self.took().as_secs_f64(),
            "cases": cases,
        })
    }
}

impl Row {
    /// The table line after the name.
    #[must_use]
    pub fn line(&self) -> String {
        let text = format!("{:12} {:8.3} s  {}", self.outcome.word(), self.took.as_secs_f64(), self.note);
        text.trim_end().to_owned()
    }
}

impl Report {
    /// The lines above the cases.
    #[must_use]
    pub fn head(&self) -> String {
        let version = if self.version.is_empty() { "unknown" } else { &self.version };
        let Self { info, .. } = self;
        let mut text = format!("{:15} {}, driver version {version}\n", "platform", info.platform);
        text += &format!("{:15} {}: {}, {} MiB\n", "device", info.ordinal, info.name, info.total_bytes >> 20);
        for (index, (name, value)) in self.capability_rows().into_iter().enumerate() {
            let first = if index == 0 { "capabilities" } else { "" };
            text += &format!("{first:15} {name} = {value}\n");
        }
        text
    }

    /// The summary line below the cases.
    #[must_use]
    pub fn sum(&self) -> String {
        let [passed, failed, not] =
            [Outcome::Passed, Outcome::Failed, Outcome::NotOffered].map(|outcome| self.count(outcome));
        format!("{passed} passed, {failed} failed, {not} not offered, {:.1} s", self.took().as_secs_f64())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.head())?;
        for row in &self.rows {
            writeln!(f, "{:24} {}", row.name, row.line())?;
        }
        writeln!(f, "\n{}", self.sum())
    }
}
