//! Set of small numbers, one bit each.

#[derive(Debug, Default)]
pub(crate) struct Bits {
    words: Vec<u64>,
}

impl Bits {
    #[inline]
    pub(crate) fn set(&mut self, number: usize, is_in: bool) {
        let (at, bit) = (number / 64, 1 << (number % 64));
        match self.words.get_mut(at) {
            Some(word) => *word = if is_in { *word | bit } else { *word & !bit },
            None => self.grow(at, if is_in { bit } else { 0 }),
        }
    }

    #[cold]
    fn grow(&mut self, at: usize, word: u64) {
        self.words.resize(at, 0);
        self.words.push(word);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> {
        let (mut words, mut base, mut rest) = (self.words.iter().enumerate(), 0, 0u64);
        std::iter::from_fn(move || {
            while rest == 0 {
                let (index, word) = words.next()?;
                (base, rest) = (index * 64, *word);
            }
            let number = base + rest.trailing_zeros() as usize;
            rest &= rest - 1;
            Some(number)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn holds_what_a_set_holds(ops in proptest::collection::vec((0usize..300, any::<bool>()), 1..100)) {
            let (mut bits, mut set) = (Bits::default(), BTreeSet::new());
            for (number, is_in) in ops {
                bits.set(number, is_in);
                if is_in { set.insert(number) } else { set.remove(&number) };
                prop_assert!(bits.iter().eq(set.iter().copied()));
            }
        }
    }
}
