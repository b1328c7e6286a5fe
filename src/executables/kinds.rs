//! Which graphs an executable can be updated between, as found out by trying.

use std::collections::HashSet;

/// Graphs that were updated into one another, directly or through others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Kind(u32);

/// The kinds of one topology: what is known to be one kind, and what is known to be two. Of the rest nothing is known.
#[derive(Debug, Default)]
pub(super) struct Kinds {
    /// Towards the kind that stands for all that are one.
    parents: Vec<u32>,
    /// Pairs of such kinds, the smaller first.
    apart: HashSet<(u32, u32)>,
}

impl Kinds {
    /// A kind that nothing is known of.
    pub(super) fn fresh(&mut self) -> Kind {
        let kind = self.parents.len() as u32;
        self.parents.push(kind);
        Kind(kind)
    }

    fn root(&self, kind: Kind) -> u32 {
        let mut at = kind.0;
        while let Some(&parent) = self.parents.get(at as usize)
            && parent != at
        {
            at = parent;
        }
        at
    }

    /// Whether the two were updated into one another.
    pub(super) fn same(&self, a: Kind, b: Kind) -> bool {
        self.root(a) == self.root(b)
    }

    /// Whether CUDA refused to update one into the other.
    pub(super) fn apart(&self, a: Kind, b: Kind) -> bool {
        self.apart.contains(&ordered(self.root(a), self.root(b)))
    }

    /// The two were updated into one another.
    pub(super) fn join(&mut self, a: Kind, b: Kind) {
        let (to, from) = ordered(self.root(a), self.root(b));
        if to == from {
            return;
        }
        if let Some(parent) = self.parents.get_mut(from as usize) {
            *parent = to;
        }
        let renamed = |kind| if kind == from { to } else { kind };
        self.apart = self.apart.iter().map(|&(a, b)| ordered(renamed(a), renamed(b))).collect();
    }

    /// One was refused as the other. Says nothing if they are known to be one: then what was refused was something else.
    pub(super) fn part(&mut self, a: Kind, b: Kind) {
        let (a, b) = ordered(self.root(a), self.root(b));
        if a != b {
            self.apart.insert((a, b));
        }
    }
}

fn ordered(a: u32, b: u32) -> (u32, u32) {
    (a.min(b), a.max(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_of_one_is_known_of_all_that_are_one_with_it() {
        let mut kinds = Kinds::default();
        let [a, b, c, d] = [(); 4].map(|()| kinds.fresh());
        kinds.part(b, c);
        kinds.join(a, b);
        kinds.join(d, c);
        assert!(kinds.same(a, b) && kinds.same(c, d) && !kinds.same(a, c));
        assert!(kinds.apart(a, d) && kinds.apart(c, a) && !kinds.apart(a, b));
    }

    #[test]
    fn a_refusal_among_equals_changes_nothing() {
        let mut kinds = Kinds::default();
        let (a, b) = (kinds.fresh(), kinds.fresh());
        kinds.join(a, b);
        kinds.part(a, b);
        assert!(kinds.same(a, b) && !kinds.apart(a, b));
    }
}
