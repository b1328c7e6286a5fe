use std::collections::BinaryHeap;

/// Work waiting for its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Due {
    /// Deadline, in any unit.
    pub by: u64,
    /// Duration.
    pub takes: u64,
    /// Time from which this work comes first, so no work waits forever.
    pub patience: u64,
}

/// Returns the serving order from `now` with the most work in time (Moore's algorithm), and the
/// number of entries before the late rest: `vmmgraph_in_turn`.
#[must_use]
pub fn deadline_order(now: u64, all: &[Due]) -> (Vec<usize>, usize) {
    let mut order: Vec<(usize, Due)> = all.iter().copied().enumerate().collect();
    order.sort_by_key(|(at, one)| (one.patience, *at));
    let first = order.partition_point(|(_, one)| one.patience <= now);
    let mut rest = order.split_off(first);
    let mut served: Vec<usize> = order.iter().map(|(at, _)| *at).collect();
    let mut over = order.iter().fold(now, |over, (_, one)| over.saturating_add(one.takes));
    rest.sort_by_key(|(at, one)| (one.by, *at));
    let mut late = vec![false; all.len()];
    let mut taken = BinaryHeap::new();
    for (at, one) in &rest {
        over = over.saturating_add(one.takes);
        taken.push((one.takes, *at));
        if over > one.by
            && let Some((takes, longest)) = taken.pop()
        {
            over = over.saturating_sub(takes);
            if let Some(late) = late.get_mut(longest) {
                *late = true;
            }
        }
    }
    let is_late = |at: usize| late.get(at).copied().unwrap_or(false);
    served.extend(rest.iter().filter(|(at, _)| !is_late(*at)).map(|(at, _)| *at));
    let timely = served.len();
    rest.sort_by_key(|(at, one)| (one.patience, *at));
    served.extend(rest.iter().filter(|(at, _)| is_late(*at)).map(|(at, _)| *at));
    (served, timely)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn timely(now: u64, all: &[Due], order: &[usize]) -> usize {
        let mut over = now;
        let mut in_time = |at: &&usize| {
            over += all[**at].takes;
            over <= all[**at].by
        };
        order.iter().filter(|at| in_time(at)).count()
    }

    proptest! {
        /// Compared with every choice of late entries.
        #[test]
        fn no_choice_gets_more_over_in_time(now in 0_u64..20, all in prop::collection::vec((0_u64..60, 1_u64..20, 0_u64..200), 0..9)) {
            let all: Vec<Due> = all.into_iter().map(|(by, takes, patience)| Due { by, takes, patience }).collect();
            let (order, count) = deadline_order(now, &all);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..all.len()).collect::<Vec<_>>());
            let first = all.iter().filter(|one| one.patience <= now).count();
            prop_assert!(order[..first].iter().all(|at| all[*at].patience <= now));
            // After the work without patience.
            let begin = now + order[..first].iter().map(|at| all[*at].takes).sum::<u64>();
            let others: Vec<usize> = (0..all.len()).filter(|at| all[*at].patience > now).collect();
            let mut best = 0;
            for choice in 0_u32..1 << others.len() {
                let mut chosen: Vec<usize> = (0..others.len()).filter(|bit| choice >> bit & 1 == 1).map(|bit| others[bit]).collect();
                chosen.sort_by_key(|at| all[*at].by);
                if timely(begin, &all, &chosen) == chosen.len() {
                    best = best.max(chosen.len());
                }
            }
            prop_assert_eq!(count - first, best);
            prop_assert_eq!(timely(begin, &all, &order[first..count]), best);
        }
    }
}
