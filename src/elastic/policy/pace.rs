use super::Due;

/// A prompt that waits to begin; times in the caller's unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Arrival time.
    pub since: u64,
    /// Deadline and duration of its first token.
    pub due: Due,
}

/// A decoding sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoding {
    /// Time of its first token.
    pub since: u64,
    /// Tokens generated.
    pub tokens: u64,
    /// Average time allowed for each token.
    pub each: u64,
}

impl Prompt {
    /// Remaining and initial time the prompt may wait and still be in time. `None`: late.
    fn slack(&self, now: u64) -> Option<(u64, u64)> {
        let last = self.due.by.checked_sub(self.due.takes)?;
        Some((last.checked_sub(now)?, last.saturating_sub(self.since)))
    }

    /// Whether the KV should move to the host instead of waiting: `vmmgraph_prompt_to_host`.
    #[must_use]
    pub fn to_host(&self, now: u64) -> bool {
        self.slack(now).is_none_or(|(left, all)| left <= all / 2)
    }

    /// Whether the prompt must begin now: a tenth of its waiting time is left, or its patience has
    /// ended. A late prompt is not urgent.
    #[must_use]
    pub fn presses(&self, now: u64) -> bool {
        self.due.patience <= now || self.slack(now).is_some_and(|(left, all)| left <= all / 10)
    }
}

impl Decoding {
    /// Late on average, with no further token before `now`.
    fn is_late(&self, now: u64) -> bool {
        now.saturating_sub(self.since) > self.each.saturating_mul(self.tokens)
    }
}

/// Whether a prefill of these prompts should wait for another decode step:
/// `vmmgraph_prefill_waits`.
#[must_use]
pub fn prefill_waits(now: u64, takes: u64, prompts: &[Prompt], decoding: &[Decoding]) -> bool {
    if prompts.iter().any(|one| one.presses(now)) {
        return false;
    }
    let over = now.saturating_add(takes);
    let late = decoding.iter().filter(|one| one.is_late(over)).count();
    late * 10 > decoding.len() * 3
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prompt(since: u64, by: u64, takes: u64, patience: u64) -> Prompt {
        Prompt { since, due: Due { by, takes, patience } }
    }

    #[test]
    fn a_prompt_waits_for_room_until_half_of_its_time_is_over() {
        let one = prompt(100, 1200, 100, u64::MAX);
        // The latest begin is 1100.
        assert!(!one.to_host(100) && !one.to_host(599) && one.to_host(600) && one.to_host(5000));
        assert!(!one.presses(999) && one.presses(1000) && one.presses(1100) && !one.presses(1101));
        assert!(prompt(0, 10, 20, 50).to_host(0), "it cannot be in time");
        assert!(!prompt(0, 10, 20, 50).presses(49) && prompt(0, 10, 20, 50).presses(50));
    }

    #[test]
    fn a_prefill_waits_for_those_that_it_would_make_late() {
        let (early, late) = (prompt(0, 1000, 10, 5000), Decoding { since: 0, tokens: 2, each: 10 });
        let fine = Decoding { tokens: 40, ..late };
        assert!(prefill_waits(0, 30, &[early], &[late]));
        assert!(!prefill_waits(0, 20, &[early], &[late]), "just in time");
        assert!(!prefill_waits(0, 30, &[early], &[]), "nobody decodes");
        assert!(!prefill_waits(0, 30, &[early], &[fine, fine, fine, late]), "one in four");
        assert!(prefill_waits(0, 30, &[early], &[fine, fine, late]));
        assert!(!prefill_waits(0, 30, &[early, prompt(0, 1000, 10, 0)], &[late]), "no more patience");
        assert!(!prefill_waits(900, 30, &[early], &[late]), "it presses");
        assert!(prefill_waits(2000, 30, &[early], &[late]), "late anyway");
    }

    proptest! {
        /// Compared with the definitions, in numbers too large to overflow.
        #[test]
        fn no_number_is_too_large(now: u64, since: u64, by: u64, takes: u64, patience: u64, each: u64, tokens: u64) {
            let one = prompt(since, by, takes, patience);
            let (now_, last) = (i128::from(now), i128::from(by) - i128::from(takes));
            let (left, all) = (last - now_, (last - i128::from(since)).max(0));
            prop_assert_eq!(one.to_host(now), left < 0 || left <= all / 2);
            let presses = patience <= now || (left >= 0 && left <= all / 10);
            prop_assert_eq!(one.presses(now), presses);
            let decoding = Decoding { since, tokens, each };
            let over = now.saturating_add(takes);
            let late = u128::from(over.saturating_sub(since)) > u128::from(each) * u128::from(tokens);
            prop_assert_eq!(prefill_waits(now, takes, &[one], &[decoding]), !presses && late);
        }
    }
}
