//! A limit that may fall below what is held.

/// The most that may be held, in any unit. When it falls, nothing more is granted from then on, and nothing is taken away: what is held
/// beyond it goes as it is given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    most: u64,
    held: u64,
}

impl Limit {
    /// Nothing is held yet.
    #[must_use]
    pub fn new(most: u64) -> Self {
        Self { most, held: 0 }
    }

    /// The most.
    #[must_use]
    pub fn most(&self) -> u64 {
        self.most
    }

    /// What is held.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// What could be granted.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.most.saturating_sub(self.held)
    }

    /// What is held beyond it.
    #[must_use]
    pub fn beyond(&self) -> u64 {
        self.held.saturating_sub(self.most)
    }

    /// Changes the most, at once.
    pub fn set(&mut self, most: u64) {
        self.most = most;
    }

    /// Grants so much, or nothing.
    pub fn take(&mut self, amount: u64) -> bool {
        let there = amount <= self.room();
        if there {
            self.held += amount;
        }
        there
    }

    /// So much is given back, or as much as is held; how much of it goes for good, because it was beyond the limit.
    pub fn give(&mut self, amount: u64) -> u64 {
        let given = amount.min(self.held);
        let gone = given.min(self.beyond());
        self.held -= given;
        gone
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Set(u64),
        Take(u64),
        Give(u64),
    }

    proptest! {
        /// Against a bag of single things, which knows the rule only.
        #[test]
        fn nothing_is_granted_above_it_and_what_is_beyond_goes_first(
            steps in prop::collection::vec(
                prop_oneof![(0_u64..30).prop_map(Step::Set), (0_u64..12).prop_map(Step::Take), (0_u64..12).prop_map(Step::Give)],
                1..60,
            ),
        ) {
            let mut limit = Limit::new(10);
            let (mut most, mut bag) = (10_usize, Vec::new());
            for step in steps {
                match step {
                    Step::Set(amount) => {
                        most = amount as usize;
                        limit.set(amount);
                    }
                    Step::Take(amount) => {
                        let fits = amount == 0 || bag.len() + amount as usize <= most;
                        // Taking nothing is always granted.
                        prop_assert_eq!(limit.take(amount), fits);
                        if fits {
                            bag.extend((0..amount).map(|_| ()));
                        }
                    }
                    Step::Give(amount) => {
                        let mut gone = 0;
                        for _ in 0..amount {
                            gone += u64::from(bag.len() > most);
                            bag.pop();
                        }
                        prop_assert_eq!(limit.give(amount), gone);
                    }
                }
                prop_assert_eq!(limit.held(), bag.len() as u64);
                prop_assert_eq!((limit.room(), limit.beyond()), (most.saturating_sub(bag.len()) as u64, bag.len().saturating_sub(most) as u64));
            }
        }
    }
}
