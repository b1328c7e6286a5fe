//! Who sees elastic memory come and go.

use std::sync::{Arc, Weak};

use crate::pages::HookGuard;
use crate::sync::Mutex;
use crate::units::Address;

/// Memory that comes or goes.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a> {
    /// The name of the buffer or cache.
    pub name: &'a str,
    /// Its number.
    pub buffer: u64,
    /// The addresses and their bytes, in order.
    pub ranges: &'a [(Address, u64)],
}

/// Who wants to know that memory comes and goes: registrations of RDMA, for one.
///
/// Called without locks, on whichever thread commits, decommits, or runs short of memory. What would wait for pages that others
/// move, a commit or the [wait](crate::Pending::wait) for one among it, is refused there.
pub trait ElasticObserver: Send + Sync {
    /// Memory is there and usable; its contents are anything. The commit has not returned yet.
    fn after_map(&self, shown: &Shown<'_>);

    /// The device is done with the memory, which is unmapped next.
    fn before_unmap(&self, shown: &Shown<'_>);
}

/// Those who want to know.
#[derive(Default)]
pub(super) struct Observers(Mutex<Vec<Weak<dyn ElasticObserver>>>);

impl Observers {
    pub(super) fn add(&self, observer: &Arc<dyn ElasticObserver>) {
        let mut all = self.0.lock();
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(observer));
    }

    pub(super) fn tell(&self, shown: &Shown<'_>, gone: bool) {
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
