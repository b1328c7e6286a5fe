//! Captures of an arena as a timeline: JSON in the trace event format of Perfetto and Chrome. One
//! microsecond stands for one allocation or free, and captures follow each other. Blocks overlap,
//! so they appear as counters.

use serde_json::{Value, json};

use super::ArenaMap;

impl ArenaMap {
    /// Returns one slice per capture, and counters of the bytes needed by the arena so far and, for
    /// traced captures, of live blocks.
    #[must_use]
    pub fn to_perfetto(&self) -> String {
        let arena = self.arena;
        let name = format!("arena {arena} on {} device {}", self.driver, self.device);
        let mut events = vec![
            json!({"ph": "M", "pid": arena, "tid": 0, "name": "process_name", "args": {"name": name}}),
            json!({"ph": "M", "pid": arena, "tid": 1, "name": "thread_name", "args": {"name": "captures"}}),
        ];
        let counter = |name: &str, at: u64, bytes: u64| -> Value {
            json!({"ph": "C", "pid": arena, "tid": 0, "name": name, "ts": at, "args": {"bytes": bytes}})
        };
        let (mut at, mut needed) = (0_u64, 0);
        let mut seen = vec![false; self.pages.len()];
        for (space, pages) in self.spaces.iter().zip(self.needs()) {
            let steps = match &space.events {
                Some(blocks) => {
                    let ends = blocks.iter().filter_map(|block| block.end);
                    let last = blocks.iter().map(|block| block.begin).chain(ends).max();
                    last.map_or(0, |last| last.saturating_add(1))
                }
                None => space.allocations.saturating_mul(2),
            };
            let mut args = json!({
                "peak_live_bytes": space.peak_live_bytes,
                "shown_bytes": space.shown_bytes,
                "retained_bytes": space.retained_bytes,
                "drop_gives_bytes": space.drop_gives_bytes,
                "allocations": space.allocations,
            });
            args["phase"] = json!(space.phase);
            let steps = steps.max(1);
            events.push(json!({
                "ph": "X", "pid": arena, "tid": 1, "name": space.name(), "ts": at, "dur": steps, "args": args,
            }));
            for page in pages {
                if !std::mem::replace(&mut seen[page], true) {
                    needed += self.pages[page].bytes;
                }
            }
            if let Some(blocks) = &space.events {
                let mut changes: Vec<(u64, i128)> = Vec::with_capacity(2 * blocks.len());
                for block in blocks {
                    changes.push((block.begin, i128::from(block.bytes)));
                    changes.extend(block.end.map(|end| (end, -i128::from(block.bytes))));
                }
                changes.sort_unstable();
                let mut live = 0_i128;
                for (step, bytes) in changes {
                    live += bytes;
                    events.push(counter("live", at.saturating_add(step), u64::try_from(live).unwrap_or(0)));
                }
                events.push(counter("live", at.saturating_add(steps), 0));
            }
            at = at.saturating_add(steps);
            events.push(counter("needed so far", at, needed));
        }
        json!({"traceEvents": events, "displayTimeUnit": "ns"}).to_string()
    }
}
