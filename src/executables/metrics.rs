//! A pool's numbers for Prometheus.

use super::{ExecutableClass, ExecutablePool, ExecutableStats};
use crate::dispatch::exposition::{Exposition, Kind, Metric};

const GRAPHS: Metric = Metric { name: "vmmgraph_executable_graphs", help: "Captured graphs, by state." };
const EXECUTABLES: Metric = Metric { name: "vmmgraph_executables", help: "Executable graphs." };
const NODES: Metric = Metric { name: "vmmgraph_executable_nodes", help: "Nodes of executable graphs." };
const BYTES: Metric =
    Metric { name: "vmmgraph_executable_bytes", help: "Device memory that executable graphs took." };
const CLASS_GRAPHS: Metric = Metric {
    name: "vmmgraph_executable_class_graphs",
    help: "Captured graphs, by the class that executables are updated in.",
};
const CLASS_BYTES: Metric = Metric {
    name: "vmmgraph_executable_class_bytes",
    help: "Device memory that the executables of a class take now.",
};
const CHANGES: Metric =
    Metric { name: "vmmgraph_executable_changes_total", help: "What became of sets of executables." };
const REPLAYS: Metric = Metric {
    name: "vmmgraph_executable_replays_total",
    help: "Replays, by whether their executables were ready.",
};

impl ExecutablePool {
    /// All numbers in Prometheus's text exposition format, with these labels on every sample; `state`, `what` and `class` are the library's
    /// own.
    #[must_use]
    pub fn prometheus(&self, labels: &[(&str, &str)]) -> String {
        self.stats().prometheus(&self.classes(), labels)
    }
}

impl ExecutableStats {
    fn prometheus(&self, classes: &[ExecutableClass], labels: &[(&str, &str)]) -> String {
        let mut text = Exposition::new(labels, &["state", "what", "class"]);
        let asleep = self.graphs.saturating_sub(self.awake);
        text.family(&GRAPHS, Kind::Gauge);
        for (state, graphs) in [("awake", self.awake), ("asleep", asleep)] {
            text.sample(&GRAPHS, &[("state", state)], graphs);
        }
        text.single(&EXECUTABLES, Kind::Gauge, self.now.executables);
        text.single(&NODES, Kind::Gauge, self.now.nodes);
        text.single(&BYTES, Kind::Gauge, self.bytes);
        let names: Vec<_> = classes.iter().map(|class| format!("{:016x}", class.id)).collect();
        text.family(&CLASS_GRAPHS, Kind::Gauge);
        for (class, name) in classes.iter().zip(&names) {
            text.sample(&CLASS_GRAPHS, &[("class", name)], class.graphs);
        }
        text.family(&CLASS_BYTES, Kind::Gauge);
        for (class, name) in classes.iter().zip(&names) {
            text.sample(&CLASS_BYTES, &[("class", name)], class.bytes);
        }
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
        let class = ExecutableClass { id: 0xab, graphs: 3, bytes: 4, ..ExecutableClass::default() };
        let text =
            stats.prometheus(&[class], &[("model", "a\"b"), ("what", "not this"), ("class", "nor this")]);
        for line in [
            r#"vmmgraph_executable_graphs{model="a\"b",state="asleep"} 3"#,
            r#"vmmgraph_executable_bytes{model="a\"b"} 7"#,
            r#"vmmgraph_executable_class_graphs{model="a\"b",class="00000000000000ab"} 3"#,
            r#"vmmgraph_executable_class_bytes{model="a\"b",class="00000000000000ab"} 4"#,
            r#"vmmgraph_executable_replays_total{model="a\"b",what="late"} 3"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{text}");
        }
        assert!(!text.contains("not this") && !text.contains("nor this"));
        assert_eq!(text.lines().filter(|line| line.starts_with("# TYPE")).count(), 8);
        assert!(ExecutableStats::default().prometheus(&[], &[]).contains("\nvmmgraph_executables 0\n"));
    }
}
