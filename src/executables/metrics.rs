use super::{ExecutablePool, ExecutableStats};
use crate::dispatch::exposition::{Exposition, Kind, Metric};

const GRAPHS: Metric = Metric { name: "vmmgraph_executable_graphs", help: "Captured graphs, by state." };
const EXECUTABLES: Metric = Metric { name: "vmmgraph_executables", help: "Executable graphs." };
const NODES: Metric = Metric { name: "vmmgraph_executable_nodes", help: "Nodes of executable graphs." };
const BYTES: Metric =
    Metric { name: "vmmgraph_executable_bytes", help: "Device memory that executable graphs took." };
const CHANGES: Metric = Metric {
    name: "vmmgraph_executable_changes_total",
    help: "Captured graphs that were instantiated or evicted.",
};
const REPLAYS: Metric = Metric {
    name: "vmmgraph_executable_replays_total",
    help: "Replays, by whether their executables were ready.",
};

impl ExecutablePool {
    /// Returns all numbers in Prometheus's text exposition format, with `labels` on every sample.
    /// The labels `state` and `what` are reserved.
    #[must_use]
    pub fn prometheus(&self, labels: &[(&str, &str)]) -> String {
        self.stats().prometheus(labels)
    }
}

impl ExecutableStats {
    fn prometheus(&self, labels: &[(&str, &str)]) -> String {
        let mut text = Exposition::new(labels, &["state", "what"]);
        let evicted = self.graphs.saturating_sub(self.instantiated);
        text.family(&GRAPHS, Kind::Gauge);
        for (state, graphs) in [("instantiated", self.instantiated), ("template_only", evicted)] {
            text.sample(&GRAPHS, &[("state", state)], graphs);
        }
        text.single(&EXECUTABLES, Kind::Gauge, self.now.executables);
        text.single(&NODES, Kind::Gauge, self.now.nodes);
        text.single(&BYTES, Kind::Gauge, self.bytes);
        let counts = self.counts;
        text.family(&CHANGES, Kind::Counter);
        for (what, times) in
            [("instantiated", counts.instantiated), ("ahead", counts.ahead), ("evicted", counts.evicted)]
        {
            text.sample(&CHANGES, &[("what", what)], times);
        }
        text.family(&REPLAYS, Kind::Counter);
        for (what, times) in [("hit", counts.hits), ("miss", counts.misses)] {
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
        let mut stats =
            ExecutableStats { graphs: 5, instantiated: 2, bytes: 7, ..ExecutableStats::default() };
        stats.counts.misses = 3;
        let text = stats.prometheus(&[("model", "a\"b"), ("what", "not this")]);
        for line in [
            r#"vmmgraph_executable_graphs{model="a\"b",state="template_only"} 3"#,
            r#"vmmgraph_executable_bytes{model="a\"b"} 7"#,
            r#"vmmgraph_executable_replays_total{model="a\"b",what="miss"} 3"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{text}");
        }
        assert!(!text.contains("not this"));
        assert_eq!(text.lines().filter(|line| line.starts_with("# TYPE")).count(), 6);
        assert!(ExecutableStats::default().prometheus(&[]).contains("\nvmmgraph_executables 0\n"));
    }
}
