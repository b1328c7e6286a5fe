//! Counters of decisions and graph events, readable at any time.

use std::sync::atomic::{AtomicU64, Ordering};

use super::dispatcher::GraphMode;
use super::exposition::{Exposition, Kind, Metric};

/// Reason of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A graph with the exact shape exists.
    Hit = 0,
    /// A graph with a larger shape exists.
    Padded = 1,
    /// A graph is captured for this step.
    Captured = 2,
    /// Eager: the modes choose eager for this phase.
    ModeEager = 3,
    /// Eager: more tokens than the threshold.
    AboveThreshold = 4,
    /// Eager: no bucket covers the step.
    TooLarge = 5,
    /// Eager: the engine declared the step not capturable.
    NotCapturable = 6,
    /// Eager: the graph is missing, and captures during serving are off.
    NotCaptured = 7,
    /// Eager: the graph is being captured elsewhere.
    BeingCaptured = 8,
    /// Eager: the maximum number of graphs is reached.
    Budget = 9,
    /// Eager: a capture of this bucket failed, now or before.
    CaptureFailed = 10,
    /// The graph of the nearest bucket is missing; a larger existing graph runs the step.
    StandIn = 11,
}

/// Event of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A capture succeeded.
    Captured = 0,
    /// A capture failed.
    Failed = 1,
    /// A graph was destroyed.
    Evicted = 2,
}

impl Reason {
    pub(crate) const ALL: [Self; 12] = [
        Self::Hit,
        Self::Padded,
        Self::Captured,
        Self::ModeEager,
        Self::AboveThreshold,
        Self::TooLarge,
        Self::NotCapturable,
        Self::NotCaptured,
        Self::BeingCaptured,
        Self::Budget,
        Self::CaptureFailed,
        Self::StandIn,
    ];

    /// Returns the reason in snake case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Padded => "padded",
            Self::Captured => "captured",
            Self::ModeEager => "mode_eager",
            Self::AboveThreshold => "above_threshold",
            Self::TooLarge => "too_large",
            Self::NotCapturable => "not_capturable",
            Self::NotCaptured => "not_captured",
            Self::BeingCaptured => "being_captured",
            Self::Budget => "budget",
            Self::CaptureFailed => "capture_failed",
            Self::StandIn => "stand_in",
        }
    }
}

/// Counters of decisions, steps and weights; a reader may see only some counters of a step in
/// progress.
#[derive(Debug, Default)]
pub struct Counters {
    decisions: [[AtomicU64; Reason::ALL.len()]; 3],
    requested: AtomicU64,
    padding: AtomicU64,
    events: [AtomicU64; 3],
    imposed: [AtomicU64; 3],
}

const GRAPHS: Metric =
    Metric { name: "vmmgraph_dispatch_graphs", help: "Graphs that exist or are being captured." };
const EVENTS: [Metric; 3] = [
    Metric { name: "vmmgraph_dispatch_captures_total", help: "Captures that succeeded." },
    Metric { name: "vmmgraph_dispatch_capture_failures_total", help: "Captures that failed." },
    Metric { name: "vmmgraph_dispatch_evictions_total", help: "Graphs that were dropped." },
];

const DECISIONS: Metric =
    Metric { name: "vmmgraph_dispatch_steps_total", help: "Steps by how they ran and why." };
const IMPOSED: Metric = Metric {
    name: "vmmgraph_dispatch_imposed_steps_total",
    help: "Steps run by an imposed decision, by mode; counted in addition to the decision made here.",
};
const REQUESTED: Metric =
    Metric { name: "vmmgraph_dispatch_requested_weight_total", help: "Weight of the steps that graphs ran." };
const PADDING: Metric = Metric {
    name: "vmmgraph_dispatch_padding_weight_total",
    help: "Weight that padding added to those steps.",
};

impl Counters {
    /// `requested` and `padding` are 0 for an eager step.
    pub(super) fn count(&self, mode: GraphMode, reason: Reason, requested: u64, padding: u64) {
        self.decisions[mode as usize][reason as usize].fetch_add(1, Ordering::Relaxed);
        if requested > 0 {
            self.requested.fetch_add(requested, Ordering::Relaxed);
        }
        if padding > 0 {
            self.padding.fetch_add(padding, Ordering::Relaxed);
        }
    }

    pub(super) fn happened(&self, event: Event) {
        self.events[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn impose(&self, mode: GraphMode) {
        self.imposed[mode as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the steps run in this mode by the decision of another rank.
    #[must_use]
    pub fn imposed(&self, mode: GraphMode) -> u64 {
        self.imposed[mode as usize].load(Ordering::Relaxed)
    }

    /// Returns the number of events of this kind.
    #[must_use]
    pub fn events(&self, event: Event) -> u64 {
        self.events[event as usize].load(Ordering::Relaxed)
    }

    /// Returns the steps run in this mode for this reason.
    #[must_use]
    pub fn steps(&self, mode: GraphMode, reason: Reason) -> u64 {
        self.decisions[mode as usize][reason as usize].load(Ordering::Relaxed)
    }

    /// Returns the weight of the steps run by graphs.
    #[must_use]
    pub fn requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed)
    }

    /// Returns the weight of their padding.
    #[must_use]
    pub fn padding(&self) -> u64 {
        self.padding.load(Ordering::Relaxed)
    }

    /// Returns all counters and the number of graphs in Prometheus's text exposition format, with
    /// `labels` on every sample. Unused counters appear as 0. Labels with an invalid or reserved
    /// name (`mode`, `reason`) are left out.
    #[must_use]
    pub fn prometheus(&self, labels: &[(&str, &str)], graphs: u32) -> String {
        let mut text = Exposition::new(labels, &["mode", "reason"]);
        text.family(&DECISIONS, Kind::Counter);
        for mode in GraphMode::ALL {
            for reason in Reason::ALL.into_iter().filter(|reason| mode.can_be(*reason)) {
                let labels = [("mode", mode.name()), ("reason", reason.name())];
                text.sample(&DECISIONS, &labels, self.steps(mode, reason));
            }
        }
        text.family(&IMPOSED, Kind::Counter);
        for mode in GraphMode::ALL {
            text.sample(&IMPOSED, &[("mode", mode.name())], self.imposed(mode));
        }
        text.single(&REQUESTED, Kind::Counter, self.requested());
        text.single(&PADDING, Kind::Counter, self.padding());
        for (metric, events) in EVENTS.iter().zip(&self.events) {
            text.single(metric, Kind::Counter, events.load(Ordering::Relaxed));
        }
        text.single(&GRAPHS, Kind::Gauge, graphs.into());
        text.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::exposition::is_label_name;
    use super::*;

    type Labels = BTreeMap<String, String>;

    fn parse(text: &str) -> Option<BTreeMap<(String, Labels), u64>> {
        let mut samples = BTreeMap::new();
        let mut declared = "";
        let mut lines = text.strip_suffix('\n')?.split('\n');
        while let Some(line) = lines.next() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                declared = help.split_once(' ')?.0;
                let kind = if declared.ends_with("_total") { "counter" } else { "gauge" };
                if lines.next()? != format!("# TYPE {declared} {kind}") {
                    return None;
                }
                continue;
            }
            let (sample, value) = line.rsplit_once(' ')?;
            let (name, labels) = match sample.split_once('{') {
                Some((name, rest)) => (name, parse_labels(rest.strip_suffix('}')?)?),
                None => (sample, Labels::new()),
            };
            if name != declared || samples.insert((name.to_owned(), labels), value.parse().ok()?).is_some() {
                return None;
            }
        }
        Some(samples)
    }

    fn parse_labels(mut rest: &str) -> Option<Labels> {
        let mut labels = Labels::new();
        loop {
            let (name, after) = rest.split_once("=\"")?;
            let (mut value, mut letters) = (String::new(), after.char_indices());
            let end = loop {
                match letters.next()? {
                    (end, '"') => break end,
                    (_, '\\') => value.push(match letters.next()?.1 {
                        'n' => '\n',
                        letter @ ('\\' | '"') => letter,
                        _ => return None,
                    }),
                    (_, letter) => value.push(letter),
                }
            };
            if !is_label_name(name) || labels.insert(name.to_owned(), value).is_some() {
                return None;
            }
            match &after[end + 1..] {
                "" => return Some(labels),
                more => rest = more.strip_prefix(',')?,
            }
        }
    }

    #[test]
    fn the_text_is_what_prometheus_documents() {
        let counters = Counters::default();
        counters.count(GraphMode::Full, Reason::Padded, 13, 3);
        counters.count(GraphMode::Eager, Reason::TooLarge, 0, 0);
        counters.happened(Event::Evicted);
        counters.impose(GraphMode::Eager);
        let text = counters.prometheus(&[("model", "a\\b\"c\nd")], 5);
        let line = r#"vmmgraph_dispatch_steps_total{model="a\\b\"c\nd",mode="full",reason="padded"} 1"#;
        assert!(text.lines().any(|found| found == line), "{text}");
        assert!(
            text.starts_with("# HELP vmmgraph_dispatch_steps_total Steps by how they ran and why.\n# TYPE ")
        );
        assert_eq!(parse(&text).unwrap().len(), 2 * 4 + 8 + 3 + 2 + 3 + 1);
        let plain = counters.prometheus(&[], 5);
        assert_eq!(parse(&plain).unwrap().values().sum::<u64>(), 1 + 1 + 1 + 13 + 3 + 1 + 5);
        assert!(plain.contains("\nvmmgraph_dispatch_imposed_steps_total{mode=\"eager\"} 1\n"), "{plain}");
        assert!(plain.contains("\nvmmgraph_dispatch_evictions_total 1\n"), "{plain}");
        assert!(plain.ends_with("\nvmmgraph_dispatch_graphs 5\n"), "{plain}");
    }

    #[test]
    fn names_that_are_no_labels_are_left_out() {
        let labels = [
            ("ok", "1"),
            ("0", "2"),
            ("a-b", "3"),
            ("", "4"),
            ("mode", "5"),
            ("__x", "6"),
            ("ok", "7"),
            ("é", "8"),
        ];
        for (_, labels) in parse(&Counters::default().prometheus(&labels, 0)).unwrap().keys() {
            assert_eq!(labels.get("ok").map(String::as_str), Some("1"));
            assert!((1..=3).contains(&labels.len()));
        }
    }

    proptest! {
        #[test]
        fn any_text_can_be_a_label(value in any::<String>(), steps in 0..u64::MAX) {
            let counters = Counters::default();
            counters.count(GraphMode::Piecewise, Reason::Hit, steps, 0);
            for ((name, labels), read) in parse(&counters.prometheus(&[("model", &value)], 0)).unwrap() {
                prop_assert_eq!(labels.get("model"), Some(&value));
                if name == REQUESTED.name {
                    prop_assert_eq!(read, steps);
                }
            }
        }
    }
}
