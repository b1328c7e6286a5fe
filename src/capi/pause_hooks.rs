use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::device::vmmgraph_device_t;
use super::guard::{guard, out};
use super::handle::{get, register, remove};
use super::status::vmmgraph_status_t;
use super::text::text;
use crate::pause::{Moved, PauseHooks};
use crate::{Address, Device};

pub struct vmmgraph_pause_hooks {
    _private: (),
}

/// Hooks called around the unmapping of a pause and the mapping of a resume, until destroyed.
pub type vmmgraph_pause_hooks_t = *mut vmmgraph_pause_hooks;

/// Range of device addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_range_t {
    pub address: u64,
    pub bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_moved_t {
    pub struct_size: usize,
    /// Tag of the region or arena.
    pub tag: *const c_char,
    /// Number of the region or arena, unique in the process.
    pub region: u64,
    /// Counts the mappings of the memory; a registration is valid for one generation.
    pub generation: u64,
    pub ranges: *const vmmgraph_range_t,
    pub range_count: usize,
}

/// Receives memory about to be unmapped, or mapped again; `moved` is valid during the call. Pausing
/// or resuming the same region inside is VMMGRAPH_ERROR_WRONG_STATE.
pub type vmmgraph_moved_fn = Option<unsafe extern "C" fn(moved: *const vmmgraph_moved_t, user: *mut c_void)>;

pub(super) struct Hooks {
    before_unmap: vmmgraph_moved_fn,
    after_map: vmmgraph_moved_fn,
    user: *mut c_void,
}

// SAFETY: the caller of vmmgraph_device_add_pause_hooks permits calls from any thread.
unsafe impl Send for Hooks {}
// SAFETY: as above.
unsafe impl Sync for Hooks {}

impl Hooks {
    fn tell(&self, function: vmmgraph_moved_fn, moved: &Moved<'_>) {
        let Some(function) = function else { return };
        let mut tag: Vec<u8> = moved.tag.bytes().filter(|byte| *byte != 0).collect();
        tag.push(0);
        let range = |(at, bytes): &(Address, u64)| vmmgraph_range_t { address: at.0, bytes: *bytes };
        let ranges: Vec<_> = moved.ranges.iter().map(range).collect();
        let told = vmmgraph_moved_t {
            struct_size: size_of::<vmmgraph_moved_t>(),
            tag: tag.as_ptr().cast(),
            region: moved.region,
            generation: moved.generation,
            ranges: ranges.as_ptr(),
            range_count: ranges.len(),
        };
        // SAFETY: the caller of vmmgraph_device_add_pause_hooks permits this call.
        unsafe { function(&raw const told, self.user) };
    }
}

impl PauseHooks for Hooks {
    fn before_unmap(&self, moved: &Moved<'_>) {
        self.tell(self.before_unmap, moved);
    }
    fn after_map(&self, moved: &Moved<'_>) {
        self.tell(self.after_map, moved);
    }
}

/// Adds hooks for memory with the tag; empty: for all memory. `before_unmap` is called when no work
/// uses the memory any more, `after_map` after it is mapped again, on other pages. Either may be
/// null. For registrations of pages, by NCCL or for RDMA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_add_pause_hooks(
    device: vmmgraph_device_t,
    tag: *const c_char,
    before_unmap: vmmgraph_moved_fn,
    after_map: vmmgraph_moved_fn,
    user: *mut c_void,
    hooks: *mut vmmgraph_pause_hooks_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let (tag, hooks) = unsafe { (text(tag, "tag")?, out(hooks, "hooks")?) };
        let made = Arc::new(Hooks { before_unmap, after_map, user });
        let told: Arc<dyn PauseHooks> = made.clone();
        device.add_pause_hooks(&tag, &told);
        *hooks = register(made);
        Ok(())
    })
}

/// Destroys the hooks. Pauses and resumes in progress may still call them.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_pause_hooks_destroy(hooks: vmmgraph_pause_hooks_t) -> vmmgraph_status_t {
    guard(|| remove::<Hooks, _>(hooks).map(drop))
}
