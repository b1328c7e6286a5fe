use std::sync::{Arc, Weak};

use crate::pause::HookGuard;
use crate::sync::Mutex;
use crate::units::Address;

/// Memory being mapped or unmapped.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a> {
    /// Name of the buffer or cache.
    pub name: &'a str,
    /// Number of the buffer or cache.
    pub buffer: u64,
    /// Addresses and their bytes, in order.
    pub ranges: &'a [(Address, u64)],
}

/// Observer of maps and unmaps, for example to register memory for RDMA. Called without locks, on
/// any thread that commits, decommits, or runs out of memory. Calls inside which would wait for
/// pages being moved are refused, such as a commit or its [wait](crate::Pending::wait).
pub trait ElasticObserver: Send + Sync {
    /// Called before a commit returns. The contents are undefined.
    fn after_map(&self, shown: &Shown<'_>);

    /// Called before memory is unmapped; no work uses it.
    fn before_unmap(&self, shown: &Shown<'_>);
}

#[derive(Default)]
pub(super) struct Observers(Mutex<Vec<Weak<dyn ElasticObserver>>>);

impl Observers {
    pub(super) fn add(&self, observer: &Arc<dyn ElasticObserver>) {
        let mut all = self.0.lock();
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(observer));
    }

    pub(super) fn notify(&self, shown: &Shown<'_>, gone: bool) {
        if shown.ranges.is_empty() {
            return;
        }
        let all: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        if all.is_empty() {
            return;
        }
        let _inside = HookGuard::enter();
        for observer in all {
            if gone { observer.before_unmap(shown) } else { observer.after_map(shown) }
        }
    }
}
