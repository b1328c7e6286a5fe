//! Registry of an arena's spaces, by weak references. Each list has its own lock, held across no
//! use and no drop of a space.

use std::sync::{Arc, Weak};

use super::{Core, EagerSpace, Space};
use crate::sync::{Mutex, yield_now};
use crate::units::ByNumber;

#[derive(Debug, Default)]
pub(crate) struct Registry {
    spaces: Mutex<ByNumber<Weak<Space>>>,
    retired: Mutex<ByNumber<Weak<Core>>>,
    eager: Mutex<Weak<EagerSpace>>,
}

impl Registry {
    pub(super) fn add(&self, space: &Arc<Space>) {
        self.spaces.lock().insert(space.id(), Arc::downgrade(space));
    }

    pub(super) fn remove(&self, space: u64) {
        self.spaces.lock().remove(&space);
    }

    /// Adds a core whose graph ends while blocks are live.
    pub(super) fn add_retired(&self, core: &Arc<Core>) {
        self.retired.lock().insert(core.id, Arc::downgrade(core));
    }

    pub(super) fn remove_retired(&self, space: u64) {
        self.retired.lock().remove(&space);
    }

    pub(super) fn set_eager(&self, space: &Arc<EagerSpace>) {
        *self.eager.lock() = Arc::downgrade(space);
    }

    pub(super) fn clear_eager(&self) {
        *self.eager.lock() = Weak::new();
    }

    /// Number of spaces, with spaces being dropped.
    pub(crate) fn count(&self) -> usize {
        self.spaces.lock().len()
    }

    pub(super) fn space(&self, id: u64) -> Option<Arc<Space>> {
        self.spaces.lock().get(&id).and_then(Weak::upgrade)
    }

    /// Spaces with a graph, except spaces being dropped.
    pub(crate) fn spaces(&self) -> Vec<Arc<Space>> {
        self.spaces.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Cores without a graph, except cores being dropped.
    pub(crate) fn retired(&self) -> Vec<Arc<Core>> {
        self.retired.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// All cores, with and without graph. Waits for cores being dropped on other threads.
    pub(super) fn cores(&self) -> Vec<Arc<Core>> {
        loop {
            let spaces: Vec<_> = self.spaces.lock().values().map(Weak::upgrade).collect();
            let retired: Vec<_> = self.retired.lock().values().map(Weak::upgrade).collect();
            let spaces = spaces.iter().map(|space| space.as_ref().map(|space| Arc::clone(space.core())));
            if let Some(all) = spaces.chain(retired).collect() {
                return all;
            }
            yield_now();
        }
    }

    /// The eager space. Waits while another thread drops the eager space.
    pub(super) fn eager(&self) -> Option<Arc<EagerSpace>> {
        loop {
            let known = self.eager.lock().clone();
            let there = known.upgrade();
            if there.is_some() || known.ptr_eq(&Weak::new()) {
                return there;
            }
            yield_now();
        }
    }

    /// The eager space, except while being dropped.
    pub(super) fn try_eager(&self) -> Option<Arc<EagerSpace>> {
        self.eager.lock().upgrade()
    }
}
