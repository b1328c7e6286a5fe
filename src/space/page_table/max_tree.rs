/// Binary tree of maxima over a row of numbers, all 0 at first.
#[derive(Debug, Default)]
pub(super) struct MaxTree {
    /// Entry `n` is the maximum of entries `2 n` and `2 n + 1`; the second half are leaves.
    nodes: Vec<u64>,
}

impl MaxTree {
    fn leaves(&self) -> usize {
        self.nodes.len() / 2
    }

    pub(super) fn set(&mut self, index: usize, value: u64) {
        if index >= self.leaves() {
            if value == 0 {
                return;
            }
            self.grow(index + 1);
        }
        let mut node = self.leaves() + index;
        self.nodes[node] = value;
        while node > 1 {
            node /= 2;
            let larger = self.nodes[2 * node].max(self.nodes[2 * node + 1]);
            if self.nodes[node] == larger {
                break;
            }
            self.nodes[node] = larger;
        }
    }

    /// `least` must not be 0.
    pub(super) fn first(&self, least: u64) -> Option<usize> {
        let mut node = 1;
        if *self.nodes.get(node)? < least {
            return None;
        }
        while node < self.leaves() {
            node *= 2;
            node += usize::from(self.nodes[node] < least);
        }
        Some(node - self.leaves())
    }

    fn grow(&mut self, least: usize) {
        let (old, leaves) = (self.leaves(), least.next_power_of_two());
        let mut nodes = vec![0; 2 * leaves];
        nodes[leaves..leaves + old].copy_from_slice(&self.nodes[old..]);
        for node in (1..leaves).rev() {
            nodes[node] = nodes[2 * node].max(nodes[2 * node + 1]);
        }
        self.nodes = nodes;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn finds_what_a_look_at_every_number_finds(
            ops in proptest::collection::vec((0usize..40, 0u64..6, 1u64..6), 1..200),
        ) {
            let (mut tree, mut row) = (MaxTree::default(), [0; 40]);
            prop_assert_eq!(tree.first(1), None);
            for (index, value, least) in ops {
                tree.set(index, value);
                row[index] = value;
                prop_assert_eq!(tree.first(least), row.iter().position(|found| *found >= least));
            }
        }
    }
}
