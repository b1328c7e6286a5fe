//! Tests of region internals. tests/regions.rs compares a region with a naive model.

use super::*;
use crate::HostOptions;
use crate::driver::HostDriver;

#[test]
fn a_turn_is_one_threads_and_comes_back() {
    let driver = HostDriver::new(0, HostOptions::default()).unwrap();
    let device = Device::with_driver(Arc::new(driver));
    let region = device.region("weights", RegionOptions::default()).unwrap();
    let turn = region.take_turn().unwrap();
    assert!(matches!(region.take_turn(), Err(Error::WrongState { .. })));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| region.take_turn().map(drop));
        drop(turn);
        assert_eq!(other.join().unwrap(), Ok(()));
    });
    assert!(region.take_turn().is_ok());
}
