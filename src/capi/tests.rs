//! A bug below the C functions: the call returns a status, and the arena permits only destruction.

use std::ptr::null_mut;
use std::sync::Arc;

use super::*;
use crate::driver::{
    Capabilities, DeviceInfo, Driver, Event, HostDriver, Memory, NotMapped, PageHandle, StreamState,
    Timeline, Transfer, Whole,
};
use crate::error::Result;
use crate::{Address, Device, HostOptions, Options, Peers, SharedVmmAllocator, Stream};

#[derive(Debug)]
struct Buggy(HostDriver);

impl Driver for Buggy {
    fn info(&self) -> &DeviceInfo {
        self.0.info()
    }
    fn capabilities(&self) -> &Capabilities {
        self.0.capabilities()
    }
}

macro_rules! forward {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {$(
        unsafe fn $name(&self, $($arg: $type),*) -> $result {
            // SAFETY: contract.
            unsafe { self.0.$name($($arg),*) }
        }
    )*};
}

// SAFETY: the host driver does all work, under the callers' contract.
unsafe impl Memory for Buggy {
    fn reserve(&self, _: u64) -> Result<Address> {
        panic!("planted")
    }
    fn free_bytes(&self) -> Result<u64> {
        self.0.free_bytes()
    }
    fn create(&self, len: u64) -> Result<PageHandle> {
        self.0.create(len)
    }
    forward! {
        free_addresses(base: Address, len: u64) -> Result<()>;
        release(page: PageHandle) -> Result<()>;
        map(at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped>;
        grant(at: Address, len: u64, peers: Peers) -> Result<()>;
        unmap(at: Address, len: u64) -> Result<()>;
    }
}

// SAFETY: as above.
unsafe impl Timeline for Buggy {
    fn other_context(&self) -> Option<u64> {
        self.0.other_context()
    }
    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()> {
        self.0.in_primary(work)
    }
    fn event_create(&self) -> Result<Event> {
        self.0.event_create()
    }
    forward! {
        stream_state(stream: Stream) -> Result<StreamState>;
        event_destroy(event: Event) -> Result<()>;
        event_record(event: Event, stream: Stream) -> Result<()>;
        event_wait(event: Event, stream: Stream) -> Result<()>;
        event_query(event: Event) -> Result<bool>;
        event_synchronize(event: Event) -> Result<()>;
        stream_destroy(stream: Stream) -> Result<()>;
    }
    fn stream_create(&self) -> Result<Stream> {
        self.0.stream_create()
    }
}

// SAFETY: as above.
unsafe impl Transfer for Buggy {
    forward! {
        fill(at: Address, len: u64, value: u32, stream: Stream) -> Result<()>;
        read(at: Address, into: &mut [u8]) -> Result<()>;
        write(at: Address, from: &[u8]) -> Result<()>;
        host_register(at: *mut u8, len: usize) -> Result<()>;
        host_unregister(at: *mut u8) -> Result<()>;
        copy_to_host(from: Address, to: *mut u8, len: usize, stream: Stream) -> Result<()>;
        copy_from_host(to: Address, from: *const u8, len: usize, stream: Stream) -> Result<()>;
    }
}

fn buggy_arena() -> (vmmgraph_arena_t, vmmgraph_space_t) {
    let driver = Buggy(HostDriver::new(7, HostOptions::default()).unwrap());
    let device = Device::with_driver(Arc::new(driver));
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let arena: vmmgraph_arena_t = handle::register(Arc::new(arena));
    let mut space = null_mut();
    // SAFETY: the out pointer is valid.
    assert_eq!(unsafe { vmmgraph_space_open(arena, &raw mut space) }, VMMGRAPH_OK);
    (arena, space)
}

fn assert_closed(arena: vmmgraph_arena_t, space: vmmgraph_space_t) {
    let (mut other, mut block) = (null_mut(), null_mut());
    // SAFETY: the out pointers are valid.
    unsafe {
        assert_eq!(vmmgraph_space_open(arena, &raw mut other), VMMGRAPH_ERROR_CLOSED);
        assert_eq!(vmmgraph_space_allocate(space, 1, null_mut(), &raw mut block), VMMGRAPH_ERROR_CLOSED);
    }
    assert_eq!(vmmgraph_space_destroy(space), VMMGRAPH_OK);
    assert_eq!(vmmgraph_arena_destroy(arena), VMMGRAPH_OK);
}

#[test]
fn a_panic_below_a_space_function_closes_the_arena() {
    let (arena, space) = buggy_arena();
    let mut block = null_mut();
    // SAFETY: the out pointer is valid.
    let status = unsafe { vmmgraph_space_allocate(space, 1, null_mut(), &raw mut block) };
    assert_eq!((status, block), (VMMGRAPH_ERROR_INTERNAL, null_mut()));
    assert_closed(arena, space);
}

#[test]
fn a_panic_below_the_torch_functions_closes_the_arena() {
    let (arena, space) = buggy_arena();
    assert_eq!(vmmgraph_torch_set_arena(7, arena), VMMGRAPH_OK);
    assert!(vmmgraph_torch_alloc(512, 7, null_mut()).is_null());
    assert_eq!(vmmgraph_torch_set_arena(7, null_mut()), VMMGRAPH_OK);
    assert_closed(arena, space);
}

#[test]
fn a_panic_below_the_bridge_closes_the_arena() {
    let (arena, space) = buggy_arena();
    let allocator = crate::VmmTorchAllocator::new(&space_of(space).unwrap());
    let status =
        guarded(|| allocator.close_arena(), || allocator.allocate(512, Stream::LEGACY, false).map(drop));
    assert_eq!(status, VMMGRAPH_ERROR_INTERNAL);
    drop(GuardedDrop::new(allocator));
    assert_closed(arena, space);
}

#[test]
fn a_panic_in_what_the_bridge_gave_away_stays_inside() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("planted in a destructor");
        }
    }
    drop(GuardedDrop::new(Bomb));
}
