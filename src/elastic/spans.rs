//! Set of numbers, stored as spans. Sets of blocks are mostly contiguous.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint spans that do not touch, from start to end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spans {
    spans: BTreeMap<u64, u64>,
    count: u64,
}

impl Spans {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    pub(super) fn touches(&self, range: &Range<u64>) -> bool {
        let last = self.spans.range(..range.end).next_back();
        !range.is_empty() && last.is_some_and(|(_, end)| *end > range.start)
    }

    pub(super) fn within(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.spans.range(..range.start).next_back();
        let from = before.filter(|(_, end)| **end > range.start).map_or(range.start, |(start, _)| *start);
        let found = self.spans.range(from..range.end);
        found.map(|(start, end)| (*start).max(range.start)..(*end).min(range.end)).collect()
    }

    pub(super) fn missing(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut at = range.start;
        let mut missing = Vec::new();
        for span in self.within(range) {
            if span.start > at {
                missing.push(at..span.start);
            }
            at = span.end;
        }
        if at < range.end {
            missing.push(at..range.end);
        }
        missing
    }

    pub(super) fn insert(&mut self, range: &Range<u64>) {
        if range.is_empty() {
            return;
        }
        self.count += self.missing(range).iter().map(|span| span.end - span.start).sum::<u64>();
        let (mut start, mut end) = (range.start, range.end);
        while let Some((first, last)) = self.spans.range(..=end).next_back().map(|(a, b)| (*a, *b)) {
            if last < start {
                break;
            }
            self.spans.remove(&first);
            (start, end) = (start.min(first), end.max(last));
        }
        self.spans.insert(start, end);
    }

    pub(super) fn remove(&mut self, range: &Range<u64>) {
        for span in self.within(range) {
            self.count -= span.end - span.start;
            let Some((first, last)) = self.spans.range(..=span.start).next_back().map(|(a, b)| (*a, *b))
            else {
                continue;
            };
            self.spans.remove(&first);
            if first < span.start {
                self.spans.insert(first, span.start);
            }
            if span.end < last {
                self.spans.insert(span.end, last);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn spans_do_what_a_set_does(steps in prop::collection::vec((any::<bool>(), 0_u64..40, 0_u64..12), 1..40)) {
            let (mut spans, mut twin) = (Spans::default(), BTreeSet::new());
            for (add, start, length) in steps {
                let range = start..start + length;
                let within: Vec<u64> = spans.within(&range).into_iter().flatten().collect();
                prop_assert_eq!(spans.touches(&range), !within.is_empty());
                prop_assert_eq!(within, twin.range(range.clone()).copied().collect::<Vec<_>>());
                if add {
                    spans.insert(&range);
                    twin.extend(range);
                } else {
                    spans.remove(&range);
                    twin.retain(|number| !range.contains(number));
                }
                let all = spans.within(&(0..100));
                prop_assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start));
                prop_assert_eq!(all.into_iter().flatten().collect::<Vec<_>>(), twin.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(spans.count(), twin.len() as u64);
                let missing = spans.missing(&(0..60)).into_iter().flatten().count();
                prop_assert_eq!(missing, 60 - twin.len());
            }
        }
    }
}
