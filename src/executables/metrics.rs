//! A pool's numbers for Prometheus.

use super::ExecutableStats;
use crate::dispatch::exposition::{Exposition, Kind, Metric};

const GRAPHS: Metric = Metric { name: "vmmgraph_executable_graphs", help: "Captured graphs, by state." };
const EXECUTABLES: Metric = Metric { name: "vmmgraph_executables", help: "Executable graphs." };
const NODES: Metric = Metric { name: "vmmgraph_executable_nodes", help: "Nodes of executable graphs." };
const BYTES: Metric =
    Metric { name: "vmmgraph_executable_bytes", help: "Device memory that executable graphs took." };
const CHANGES: Metric =
    Metric { name: "vmmgraph_executable_changes_total", help: "What became of sets of executables." };
const REPLAYS: Metric = Metric {
    name: "vmmgraph_executable_replays_total",
    help: "Replays, by whether their executables were ready.",
};

impl ExecutableStats {
    /// All numbers in Prometheus's text exposition format, with these labels on every sample; `state` and `what` are the library's own.
    #[must_use]
    pub fn prometheus(&self, labels: &[(&str, &str)]) -> String {
        let mut text = Exposition::new(labels, &["state", "what"]);
        let asleep = self.graphs.saturating_sub(self.awake);
        text.family(&GRAPHS, Kind::Gauge);
        for (state, graphs) in [("awake", self.awake), ("asleep", asleep)] {
            text.sample(&GRAPHS, &[("state", state)], graphs);
        }
        text.single(&EXECUTABLES, Kind::Gauge, self.now.executables);
        text.single(&NODES, Kind::Gauge, self.now.nodes);
        text.single(&BYTES, Kind::Gauge, self.bytes);
        let counts = self.counts;
        text.family(&CHANGES, Kind::Counter);
        for (what, times) in [
            ("made", counts.made),
            ("updated", counts.updated),
            ("refused", counts.refused),
            ("dropped", counts.dropped),
            ("woken", counts.woken),
        ] {
            text.sample(&CHANGES, &[("what", what)], times);
        }
        text.family(&REPLAYS, Kind::Counter);
        for (what, times) in [("ready", counts.ready), ("late", counts.late)] {
            text.sample(&REPLAYS, &[("what", what)], times);
        }
        text.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_there_under_its_label() {
        let mut stats = ExecutableStats { graphs: 5, awake: 2, bytes: 7, ..ExecutableStats::default() };
        stats.counts.late = 3;
        let text = stats.prometheus(&[("model", "a\"b"), ("what", "not this")]);
        for line in [
            r#"vmmgraph_executable_graphs{model="a\"b",state="asleep"} 3"#,
            r#"vmmgraph_executable_bytes{model="a\"b"} 7"#,
            r#"vmmgraph_executable_replays_total{model="a\"b",what="late"} 3"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{text}");
        }
        assert!(!text.contains("not this"));
        assert_eq!(text.lines().filter(|line| line.starts_with("# TYPE")).count(), 6);
        assert!(ExecutableStats::default().prometheus(&[]).contains("\nvmmgraph_executables 0\n"));
    }
}
