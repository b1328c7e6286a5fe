use smallvec::SmallVec;

use crate::error::{Error, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run<S> {
    /// Equal values are one piece.
    pub(super) source: S,
    pub(super) from: u64,
    pub(super) to: u64,
    /// 0: no copy.
    pub(super) bytes: u64,
}

pub(super) type Runs<S> = SmallVec<[Run<S>; 1]>;

/// Merges runs adjacent in host memory and in the unit, ordered by place. Fails with the offset in
/// the unit of a run which ends beyond `bytes` or overlaps another.
pub(super) fn merge<S: PartialEq>(mut runs: Runs<S>, bytes: u64) -> Result<Runs<S>> {
    let refused = |at: u64, expected| {
        Err(Error::InvalidArgument { what: "a run's place in its unit", value: at.into(), expected })
    };
    runs.retain(|run| run.bytes > 0);
    runs.sort_by_key(|run| run.to);
    let mut merged = Runs::new();
    for run in runs {
        if run.to.checked_add(run.bytes).is_none_or(|end| end > bytes) {
            return refused(run.to, "with its bytes within the unit");
        }
        match merged.last_mut() {
            Some(last) if last.to + last.bytes > run.to => {
                return refused(run.to, "behind the run before it");
            }
            Some(last)
                if last.source == run.source
                    && last.to + last.bytes == run.to
                    && last.from.checked_add(last.bytes) == Some(run.from) =>
            {
                last.bytes += run.bytes;
            }
            _ => merged.push(run),
        }
    }
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn merge<S: Clone + PartialEq>(runs: &[Run<S>], bytes: u64) -> Result<Vec<Run<S>>> {
        super::merge(runs.iter().cloned().collect(), bytes).map(|merged| merged.into_vec())
    }

    fn run(source: u8, from: u64, to: u64, bytes: u64) -> Run<u8> {
        Run { source, from, to, bytes }
    }

    #[test]
    fn neighbours_on_both_sides_are_one_copy_and_others_are_not() {
        let merged = |runs: &[Run<u8>]| merge(runs, 100);
        assert_eq!(merged(&[run(1, 0, 0, 10), run(1, 10, 10, 5)]), Ok(vec![run(1, 0, 0, 15)]));
        // In any order, with an empty run in between.
        let shuffled = [run(1, 10, 10, 5), run(1, 70, 3, 0), run(1, 0, 0, 10)];
        assert_eq!(merged(&shuffled), Ok(vec![run(1, 0, 0, 15)]));
        for apart in [run(2, 10, 10, 5), run(1, 11, 10, 5), run(1, 10, 11, 5)] {
            assert_eq!(merged(&[run(1, 0, 0, 10), apart]).map(|runs| runs.len()), Ok(2), "{apart:?}");
        }
        assert_eq!(merged(&[]), Ok(vec![]));
    }

    #[test]
    fn what_overlaps_or_leaves_the_unit_is_refused_with_its_place() {
        let at = |runs: &[Run<u8>]| match merge(runs, 100) {
            Err(Error::InvalidArgument { value, .. }) => value,
            other => panic!("{other:?}"),
        };
        assert_eq!(at(&[run(1, 0, 0, 10), run(2, 0, 9, 10)]), 9);
        assert_eq!(at(&[run(1, 0, 91, 10)]), 91);
        assert_eq!(at(&[run(1, 0, u64::MAX, 2)]), i128::from(u64::MAX));
        assert!(merge(&[run(1, u64::MAX, 0, 4), run(1, 3, 4, 4)], 100).is_ok());
    }

    proptest! {
        #[test]
        fn merged_runs_copy_the_same_bytes(
            runs in prop::collection::vec((0_u8..2, 0_u64..24, 0_u64..40, 0_u64..8), 0..12)
        ) {
            let runs: Vec<_> = runs.into_iter().map(|(source, from, to, bytes)| run(source, from, to, bytes)).collect();
            let bytes = |runs: &[Run<u8>]| {
                let mut unit = [None; 40];
                for run in runs {
                    for at in 0..run.bytes {
                        let place = unit.get_mut((run.to + at) as usize)?;
                        if place.replace((run.source, run.from + at)).is_some() {
                            return None;
                        }
                    }
                }
                Some(unit)
            };
            let expected = bytes(&runs);
            match merge(&runs, 40) {
                Ok(merged) => {
                    prop_assert!(merged.len() <= runs.len());
                    prop_assert_eq!(bytes(&merged), expected);
                    for pair in merged.windows(2) {
                        prop_assert!(merge(pair, 40).is_ok_and(|again| again.len() == 2));
                    }
                }
                Err(_) => prop_assert_eq!(expected, None),
            }
        }
    }
}
