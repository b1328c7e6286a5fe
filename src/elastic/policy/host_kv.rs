use std::collections::BTreeMap;

use super::Limit;
use crate::error::{Error, Result};

/// Host memory for KV: a prompt without room on the device is prefilled anyway, and its KV waits on
/// the host. The logical size limits the use of the physical one.
#[derive(Clone, Debug)]
pub struct HostKv {
    physical: u64,
    limit: Limit,
    held: BTreeMap<u64, u64>,
}

impl HostKv {
    /// All `physical` bytes are usable.
    #[must_use]
    pub fn new(physical: u64) -> Self {
        Self { physical, limit: Limit::new(physical), held: BTreeMap::new() }
    }

    /// Sets the logical size, at most the physical one. KV beyond stays until taken.
    pub fn set_logical(&mut self, bytes: u64) {
        self.limit.set(bytes.min(self.physical));
    }

    /// Returns the logical size in bytes.
    #[must_use]
    pub fn logical(&self) -> u64 {
        self.limit.most()
    }

    /// Returns the physical size in bytes.
    #[must_use]
    pub fn physical(&self) -> u64 {
        self.physical
    }

    /// Returns the number of sequences on the host.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.held.len()
    }

    /// Returns the bytes of sequences on the host.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.limit.held()
    }

    /// Adds a sequence; false if it exists or the logical size is exceeded.
    pub fn put(&mut self, sequence: u64, bytes: u64) -> bool {
        let taken = !self.held.contains_key(&sequence) && self.limit.take(bytes);
        if taken {
            self.held.insert(sequence, bytes);
        }
        taken
    }

    /// Like [`put`](Self::put), within the physical size: for a sequence that would lose its KV.
    pub fn rescue(&mut self, sequence: u64, bytes: u64) -> bool {
        let logical = self.logical();
        self.limit.set(self.physical);
        let taken = self.put(sequence, bytes);
        self.limit.set(logical);
        taken
    }

    /// Removes a sequence and returns its bytes; [`Error::InvalidArgument`] if unknown.
    pub fn take(&mut self, sequence: u64) -> Result<u64> {
        let Some(bytes) = self.held.remove(&sequence) else {
            let expected = "a sequence whose KV memory is on the host";
            return Err(Error::InvalidArgument { what: "a sequence", value: sequence.into(), expected });
        };
        self.limit.give(bytes);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Logical(u64),
        Put(u64, u64),
        Rescue(u64, u64),
        Take(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0_u64..40).prop_map(Step::Logical),
            (0_u64..6, 0_u64..12).prop_map(|(who, bytes)| Step::Put(who, bytes)),
            (0_u64..6, 0_u64..12).prop_map(|(who, bytes)| Step::Rescue(who, bytes)),
            (0_u64..6).prop_map(Step::Take),
        ]
    }

    proptest! {
        #[test]
        fn it_holds_what_was_put_within_the_size_of_then(steps in prop::collection::vec(step(), 1..60)) {
            let mut buffer = HostKv::new(30);
            let (mut logical, mut twin) = (30_u64, BTreeMap::new());
            for step in steps {
                let held: u64 = twin.values().sum();
                match step {
                    Step::Logical(bytes) => {
                        logical = bytes.min(30);
                        buffer.set_logical(bytes);
                    }
                    Step::Put(who, bytes) => {
                        let fits = !twin.contains_key(&who) && (bytes == 0 || held + bytes <= logical);
                        prop_assert_eq!(buffer.put(who, bytes), fits);
                        if fits {
                            twin.insert(who, bytes);
                        }
                    }
                    Step::Rescue(who, bytes) => {
                        let fits = !twin.contains_key(&who) && held + bytes <= 30;
                        prop_assert_eq!(buffer.rescue(who, bytes), fits);
                        if fits {
                            twin.insert(who, bytes);
                        }
                    }
                    Step::Take(who) => prop_assert_eq!(buffer.take(who).ok(), twin.remove(&who)),
                }
                prop_assert_eq!((buffer.logical(), buffer.held()), (logical, twin.values().sum::<u64>()));
                prop_assert!(buffer.held() <= 30);
            }
        }
    }
}
