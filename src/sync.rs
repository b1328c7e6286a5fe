//! The only place that names the lock library, so that shuttle can take its place.

#[cfg(not(feature = "shuttle"))]
pub(crate) use parking_lot::Mutex;
#[cfg(feature = "shuttle")]
pub(crate) use shuttle_parking_lot::Mutex;
