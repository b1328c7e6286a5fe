/// Limit of an amount, in any unit, which may fall below the amount in use: it stops grants at
/// once, but takes nothing away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    most: u64,
    held: u64,
}

impl Limit {
    /// Creates a limit with nothing in use.
    #[must_use]
    pub fn new(most: u64) -> Self {
        Self { most, held: 0 }
    }

    /// Returns the limit.
    #[must_use]
    pub fn most(&self) -> u64 {
        self.most
    }

    /// Returns the amount in use.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Returns the amount that can be granted.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.most.saturating_sub(self.held)
    }

    /// Returns the amount in use above the limit.
    #[must_use]
    pub fn beyond(&self) -> u64 {
        self.held.saturating_sub(self.most)
    }

    /// Sets the limit at once.
    pub fn set(&mut self, most: u64) {
        self.most = most;
    }

    /// Grants `amount`, or nothing.
    pub fn take(&mut self, amount: u64) -> bool {
        let there = amount <= self.room();
        if there {
            self.held += amount;
        }
        there
    }

    /// Gives back at most `amount`. Returns the part above the limit.
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
