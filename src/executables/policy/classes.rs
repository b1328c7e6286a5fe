//! What a pool's executables take, by what they can be updated between.

use std::collections::BTreeMap;

use super::super::ExecutableClass;
use super::Policy;

impl Policy {
    /// One for each topology that there is a graph of, that which takes most first.
    pub(in super::super) fn classes(&self) -> Vec<ExecutableClass> {
        let mut classes: BTreeMap<u64, ExecutableClass> = BTreeMap::new();
        for member in self.members.values() {
            let class = classes.entry(member.topology).or_default();
            class.id = member.topology;
            class.graphs += 1;
            class.awake += u64::from(member.set.is_some());
        }
        for set in self.sets.values() {
            // The last graph of a topology takes its sets along.
            let Some(class) = classes.get_mut(&set.topology) else { continue };
            class.now.executables += set.size.executables;
            class.now.nodes += set.size.nodes;
        }
        let mut classes: Vec<_> = classes.into_values().collect();
        classes.iter_mut().for_each(|class| class.bytes = self.ledger.share(class.now));
        classes.sort_by_key(|class| (std::cmp::Reverse(class.bytes), class.id));
        classes
    }
}
