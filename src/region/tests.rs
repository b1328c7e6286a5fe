//! Tests of region internals. tests/pause/regions.rs compares a region with a naive model.

use super::*;
use crate::HostOptions;
use crate::driver::HostDriver;

#[test]
fn a_turn_is_one_threads_and_comes_back() {
    let driver = HostDriver::new(0, HostOptions::default()).unwrap();
    let device = Device::with_driver(Arc::new(driver));
    let region = device.region("weights", RegionOptions::default()).unwrap();
    let guard = region.enter_pause_section().unwrap();
    assert!(matches!(region.enter_pause_section(), Err(Error::WrongState { .. })));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| region.enter_pause_section().map(drop));
        drop(guard);
        assert_eq!(other.join().unwrap(), Ok(()));
    });
    assert!(region.enter_pause_section().is_ok());
}
