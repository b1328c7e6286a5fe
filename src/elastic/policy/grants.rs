use std::collections::VecDeque;

/// Pages a step needs in addition to its current pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// KV pages, until the step's sequences end.
    pub kv: u64,
    /// Activation pages, until the step ends.
    pub activations: u64,
}

impl Need {
    /// Returns the sum.
    #[must_use]
    pub fn pages(self) -> u64 {
        self.kv.saturating_add(self.activations)
    }

    fn is_of(self, pages: u64) -> bool {
        self.kv.checked_add(self.activations).is_some_and(|all| all <= pages)
    }
}

/// Result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Both are granted.
    Granted,
    /// Neither is granted: ask again after a release, in the same place of the queue.
    NotNow,
    /// The request exceeds all pages.
    Never,
}

/// One budget of pages for the KV memory and the activations of all running steps:
/// `vmmgraph_grants_create`.
#[derive(Clone, Debug)]
pub struct Grants {
    pages: u64,
    overtakes: u64,
    kv: u64,
    activations: u64,
    /// Step, need, number of overtakes.
    waiting: VecDeque<(u64, Need, u64)>,
}

impl Grants {
    /// `overtakes`: how often a waiting step may be overtaken.
    #[must_use]
    pub fn new(pages: u64, overtakes: u64) -> Self {
        Self { pages, overtakes, kv: 0, activations: 0, waiting: VecDeque::new() }
    }

    /// Returns the pages not granted.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.pages.saturating_sub(self.kv).saturating_sub(self.activations)
    }

    /// Returns the pages granted for KV memory.
    #[must_use]
    pub fn kv(&self) -> u64 {
        self.kv
    }

    /// Returns the pages granted for activations.
    #[must_use]
    pub fn activations(&self) -> u64 {
        self.activations
    }

    /// Changes the budget; grants beyond stay until released.
    pub fn set_pages(&mut self, pages: u64) {
        self.pages = pages;
    }

    /// Returns the budget.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the number of waiting steps.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests pages for step `who`. A waiting step may change its request.
    pub fn ask(&mut self, who: u64, need: Need) -> Answer {
        if !need.is_of(self.pages) {
            self.forget(who);
            return Answer::Never;
        }
        let place = self.waiting.iter().position(|(other, ..)| *other == who);
        let ahead = place.unwrap_or(self.waiting.len());
        let rest = self.free().checked_sub(need.pages());
        // It no longer fits beside this one, or does not fit now.
        let stopped = |(_, other, times): &(u64, Need, u64)| {
            rest.is_some_and(|rest| other.pages() > rest) && *times >= self.overtakes
        };
        let Some(rest) = rest.filter(|_| !self.waiting.iter().take(ahead).any(stopped)) else {
            match place.and_then(|place| self.waiting.get_mut(place)) {
                Some(waiting) => waiting.1 = need,
                None => self.waiting.push_back((who, need, 0)),
            }
            return Answer::NotNow;
        };
        for (_, other, times) in self.waiting.iter_mut().take(ahead) {
            *times += u64::from(other.pages() > rest);
        }
        self.forget(who);
        self.kv += need.kv;
        self.activations += need.activations;
        Answer::Granted
    }

    /// Takes KV pages for a running step, ahead of all waiting steps; false if too few are free.
    pub fn extend(&mut self, kv: u64) -> bool {
        let there = kv <= self.free();
        if there {
            self.kv += kv;
        }
        there
    }

    /// Removes a waiting step.
    pub fn forget(&mut self, who: u64) {
        self.waiting.retain(|(other, ..)| *other != who);
    }

    /// Returns pages of ended steps and sequences.
    pub fn give(&mut self, back: Need) {
        self.kv = self.kv.saturating_sub(back.kv);
        self.activations = self.activations.saturating_sub(back.activations);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn steps() -> impl Strategy<Value = Vec<(Need, usize)>> {
        let need = (0_u64..12, 0_u64..12).prop_map(|(kv, activations)| Need { kv, activations });
        prop::collection::vec((need, 0_usize..4), 1..40)
    }

    proptest! {
        /// In any order of ends and requests, no step waits forever.
        #[test]
        fn steps_get_both_or_neither_and_all_get_their_turn(pages in 1_u64..20, overtakes in 0_u64..4, steps in steps()) {
            let mut grants = Grants::new(pages, overtakes);
            let (mut held, mut waiting) = (BTreeMap::new(), BTreeMap::new());
            let mut overtaken: BTreeMap<u64, u64> = BTreeMap::new();
            let mut ask = |grants: &mut Grants, held: &mut BTreeMap<u64, Need>, waiting: &mut BTreeMap<u64, Need>, who: u64, need: Need| {
                let before: u64 = held.values().map(|need: &Need| need.pages()).sum();
                match grants.ask(who, need) {
                    Answer::Never => {
                        prop_assert!(need.pages() > pages);
                        waiting.remove(&who);
                    }
                    Answer::NotNow => {
                        let older = waiting.keys().any(|other| *other < who);
                        prop_assert!(before + need.pages() > pages || older, "refused beside room, with nobody before it");
                        waiting.insert(who, need);
                    }
                    Answer::Granted => {
                        prop_assert!(before + need.pages() <= pages);
                        waiting.remove(&who);
                        held.insert(who, need);
                        let free = pages - before - need.pages();
                        for (other, theirs) in waiting.iter() {
                            if *other < who && theirs.pages() > free {
                                let times = overtaken.entry(*other).or_default();
                                *times += 1;
                                prop_assert!(*times <= overtakes, "{other} was overtaken {times} times");
                            }
                        }
                    }
                }
                let sums = held.values().fold(Need::default(), |sum, need| Need {
                    kv: sum.kv + need.kv,
                    activations: sum.activations + need.activations,
                });
                prop_assert_eq!((grants.kv(), grants.activations()), (sums.kv, sums.activations));
                prop_assert_eq!(grants.free(), pages - sums.pages());
                Ok(())
            };
            for (who, (need, ends)) in steps.into_iter().enumerate() {
                ask(&mut grants, &mut held, &mut waiting, who as u64, need)?;
                if let Some((who, need)) = held.iter().nth(ends).map(|(who, need)| (*who, *need)) {
                    held.remove(&who);
                    grants.give(need);
                }
            }
            // Asking in reverse order.
            while !waiting.is_empty() {
                let before = waiting.len();
                let ended = held.pop_first();
                ended.iter().for_each(|(_, need)| grants.give(*need));
                for who in waiting.keys().rev().copied().collect::<Vec<_>>() {
                    let need = waiting[&who];
                    ask(&mut grants, &mut held, &mut waiting, who, need)?;
                }
                prop_assert!(ended.is_some() || waiting.len() < before, "{waiting:?} wait for nobody");
            }
        }
    }

    #[test]
    fn two_halves_that_would_wait_for_each_other_are_not_handed_out() {
        let mut grants = Grants::new(10, 0);
        assert_eq!(grants.ask(1, Need { kv: 5, activations: 1 }), Answer::Granted);
        // The KV memory alone would fit.
        assert_eq!(grants.ask(2, Need { kv: 4, activations: 4 }), Answer::NotNow);
        assert_eq!((grants.kv(), grants.activations()), (5, 1));
        // Small steps do not overtake, unless both fit.
        assert_eq!(grants.ask(3, Need { kv: 3, activations: 0 }), Answer::NotNow);
        assert!(grants.extend(2) && !grants.extend(3));
        grants.give(Need { kv: 7, activations: 1 });
        assert_eq!(grants.ask(3, Need { kv: 2, activations: 0 }), Answer::Granted);
        assert_eq!(grants.ask(2, Need { kv: 4, activations: 4 }), Answer::Granted);
        assert_eq!(grants.ask(4, Need { kv: 11, activations: 0 }), Answer::Never);
    }

    #[test]
    fn fewer_pages_take_nothing_away_and_more_let_others_begin() {
        let mut grants = Grants::new(10, 0);
        assert_eq!(grants.ask(1, Need { kv: 6, activations: 2 }), Answer::Granted);
        assert_eq!(grants.ask(2, Need { kv: 5, activations: 0 }), Answer::NotNow);
        grants.set_pages(4);
        assert_eq!((grants.pages(), grants.kv(), grants.activations(), grants.free()), (4, 6, 2, 0));
        // A request that became impossible stops waiting.
        assert_eq!(
            (grants.waiting(), grants.ask(2, Need { kv: 5, activations: 0 }), grants.waiting()),
            (1, Answer::Never, 0)
        );
        assert!(!grants.extend(1) && grants.extend(0));
        grants.give(Need { kv: 3, activations: 2 });
        assert_eq!(grants.ask(3, Need { kv: 1, activations: 1 }), Answer::NotNow);
        grants.set_pages(5);
        assert_eq!(grants.ask(3, Need { kv: 1, activations: 1 }), Answer::Granted);
    }

    #[test]
    fn needs_beyond_all_numbers_are_never_met() {
        let mut grants = Grants::new(u64::MAX, 0);
        assert_eq!(grants.ask(1, Need { kv: u64::MAX, activations: 1 }), Answer::Never);
        assert_eq!(grants.ask(1, Need { kv: u64::MAX, activations: 0 }), Answer::Granted);
        assert_eq!(grants.ask(2, Need { kv: 0, activations: 1 }), Answer::NotNow);
    }
}
