//! Extents in order of use: a doubly linked list within a table.

#[derive(Clone, Copy, Debug, Default)]
struct Link {
    newer: Option<usize>,
    older: Option<usize>,
}

/// Numbers 0, 1, 2, …, most recently used first.
#[derive(Debug, Default)]
pub(crate) struct Recency {
    links: Vec<Link>,
    newest: Option<usize>,
}

impl Recency {
    pub(crate) fn add(&mut self) {
        self.links.push(Link::default());
        self.link(self.links.len() - 1);
    }

    pub(crate) fn touch(&mut self, number: usize) {
        if self.newest == Some(number) {
            return;
        }
        let Link { newer, older } = self.links[number];
        if let Some(newer) = newer {
            self.links[newer].older = older;
        }
        if let Some(older) = older {
            self.links[older].newer = newer;
        }
        self.link(number);
    }

    pub(crate) fn newest(&self) -> Option<usize> {
        self.newest
    }

    pub(crate) fn older(&self, number: usize) -> Option<usize> {
        self.links[number].older
    }

    fn link(&mut self, number: usize) {
        let older = self.newest.replace(number);
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
        fn orders_as_a_plain_list(ops in proptest::collection::vec((any::<bool>(), any::<usize>()), 1..100)) {
            let mut recency = Recency::default();
            let mut list: Vec<usize> = Vec::new();
            for (add, which) in ops {
                if add || list.is_empty() {
                    recency.add();
                    list.insert(0, list.len());
                } else {
                    let number = list.remove(which % list.len());
                    recency.touch(number);
                    list.insert(0, number);
                }
                let found: Vec<usize> =
                    std::iter::successors(recency.newest(), |number| recency.older(*number)).collect();
                prop_assert_eq!(&found, &list);
            }
        }
    }
}
