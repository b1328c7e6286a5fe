//! Windows in the order of their use: a doubly linked list for each zone, threaded through one table.

#[derive(Clone, Copy, Debug, Default)]
struct Link {
    newer: Option<usize>,
    older: Option<usize>,
}

/// Numbers 0, 1, 2, … each in one of `ZONES` lists, most recently used first.
#[derive(Debug)]
pub(crate) struct Recency<const ZONES: usize> {
    links: Vec<Link>,
    newest: [Option<usize>; ZONES],
}

impl<const ZONES: usize> Recency<ZONES> {
    pub(crate) fn new() -> Self {
        Self { links: Vec::new(), newest: [None; ZONES] }
    }

    /// Adds the next number as the newest of a zone.
    pub(crate) fn add(&mut self, zone: usize) {
        self.links.push(Link::default());
        self.link(zone, self.links.len() - 1);
    }

    /// Makes a number the newest of its zone.
    pub(crate) fn touch(&mut self, zone: usize, number: usize) {
        if self.newest[zone] == Some(number) {
            return;
        }
        let Link { newer, older } = self.links[number];
        if let Some(newer) = newer {
            self.links[newer].older = older;
        }
        if let Some(older) = older {
            self.links[older].newer = newer;
        }
        self.link(zone, number);
    }

    pub(crate) fn newest(&self, zone: usize) -> Option<usize> {
        self.newest[zone]
    }

    /// The number used last before this one.
    pub(crate) fn older(&self, number: usize) -> Option<usize> {
        self.links[number].older
    }

    fn link(&mut self, zone: usize, number: usize) {
        let older = self.newest[zone].replace(number);
        if let Some(older) = older {
            self.links[older].newer = Some(number);
        }
        self.links[number] = Link { newer: None, older };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn orders_as_two_plain_lists(ops in proptest::collection::vec((any::<bool>(), 0usize..2, any::<usize>()), 1..100)) {
            let mut recency = Recency::<2>::new();
            let mut lists: [Vec<usize>; 2] = Default::default();
            let mut next = 0;
            for (add, zone, which) in ops {
                if add || lists[zone].is_empty() {
                    recency.add(zone);
                    lists[zone].insert(0, next);
                    next += 1;
                } else {
                    let at = which % lists[zone].len();
                    let number = lists[zone].remove(at);
                    recency.touch(zone, number);
                    lists[zone].insert(0, number);
                }
                for (zone, list) in lists.iter().enumerate() {
                    let found: Vec<usize> =
                        std::iter::successors(recency.newest(zone), |number| recency.older(*number)).collect();
                    prop_assert_eq!(&found, list);
                }
            }
        }
    }
}
