//! Counting the calls that can fail in real life, and making the n-th of them fail.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::code::{Answer, Code};

macro_rules! counted_calls {
    ($($name:ident),*) => {
        /// The calls a library's memory layer makes and must survive the failure of.
        #[derive(Clone, Copy)]
        #[allow(clippy::enum_variant_names, reason = "the functions' own names")]
        #[allow(non_camel_case_types, reason = "the functions' own names")]
        pub(crate) enum Call { $($name),* }

        /// With a zero at the end, for C.
        const NAMES: &[&str] = &[$(concat!(stringify!($name), "\0")),*];
    };
}

counted_calls! {
    cuMemAddressReserve, cuMemAddressFree, cuMemCreate, cuMemRelease, cuMemMap, cuMemUnmap, cuMemSetAccess, cuEventCreate,
    cuEventDestroy_v2, cuEventRecord, cuEventQuery, cuStreamWaitEvent, cuEventSynchronize, cuStreamIsCapturing,
    cuMemGetInfo_v2, cuStreamCreate, cuStreamDestroy_v2, cuMemHostRegister_v2, cuMemHostUnregister, cuMemcpyDtoHAsync_v2,
    cuMemcpyHtoDAsync_v2, cuMemsetD32Async, cuGraphInstantiateWithFlags, cuGraphExecUpdate_v2, cuGraphExecDestroy
}

/// How many of the next questions whether an event has happened are answered with no.
static BUSY: AtomicU64 = AtomicU64::new(0);

/// Answers the next so many questions for an event with no.
pub(crate) fn keep_busy(questions: u64) {
    BUSY.store(questions, Relaxed);
}

/// Whether this question for an event is one of those.
pub(crate) fn busy() -> bool {
    BUSY.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok()
}

/// A failure to come.
struct Fault {
    calls_left: u64,
    code: Code,
}

static COUNTS: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];
static FAILED: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];
static FAULTS: Mutex<[Option<Fault>; 2]> = Mutex::new([const { None }; 2]);

/// Counts a call; an error if it is the one that was to fail. Comes first in its function, so that it has no effect then.
pub(crate) fn counted(call: Call) -> Answer {
    COUNTS[call as usize].fetch_add(1, Relaxed);
    let mut result = Ok(());
    for slot in FAULTS.lock().iter_mut() {
        let Some(fault) = slot else { continue };
        fault.calls_left -= 1;
        if fault.calls_left == 0 {
            result = Err(fault.code);
            FAILED[call as usize].fetch_add(1, Relaxed);
            *slot = None;
        }
    }
    result
}

/// Makes the `nth` counted call from now fail, in one of two independent slots; zero disarms the slot.
pub(crate) fn arm(slot: usize, nth: u64, code: Code) {
    FAULTS.lock()[slot] = (nth > 0).then_some(Fault { calls_left: nth, code });
}

/// Counted calls of one name since the last reset, or of all.
pub(crate) fn count(name: Option<&str>) -> u64 {
    NAMES
        .iter()
        .zip(&COUNTS)
        .filter(|(n, _)| name.is_none_or(|name| name == n.trim_end_matches('\0')))
        .map(|(_, c)| c.load(Relaxed))
        .sum()
}

/// The name of the `index`-th counted function and how often a call of it was made to fail, ever.
pub(crate) fn failed(index: usize) -> Option<(&'static str, u64)> {
    Some((NAMES.get(index)?, FAILED[index].load(Relaxed)))
}

/// Starts counting anew.
pub(crate) fn reset() {
    COUNTS.iter().for_each(|c| c.store(0, Relaxed));
}
