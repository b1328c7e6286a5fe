//! Any valid sequence of C calls matches a naive model: live blocks, all counters, contents seen by
//! replays.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "the C functions' contracts are kept: every pointer is a local's"
)]

use std::ffi::{CStr, c_char, c_void};
use std::mem::{size_of, zeroed};
use std::ptr::{self, null, null_mut};
use std::sync::Mutex;

use crate::input::Input;
use crate::platforms;
use vmmgraph::capi::*;
use vmmgraph_testkit::alone;

const MEMORY: u64 = 8 << 20;
const ORDINAL: i32 = 0;
const SIZES: [u64; 12] =
    [1, 512, 513, 3000, 4096, 8192, 9000, 16 << 10, 40 << 10, 64 << 10, 100_000, 300_000];

macro_rules! sized {
    ($type:ty) => {{
        let mut value: $type = unsafe { zeroed() };
        value.struct_size = size_of::<$type>();
        value
    }};
}

#[derive(Clone, Copy)]
enum Step {
    Allocate(usize),
    Free(usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Live,
    /// Freed, and busy until the seal, because a second stream used the block.
    Parked,
    Freed,
}

struct Block {
    at: u64,
    bytes: u64,
    stream: u64,
    crossing: bool,
    kept: bool,
    life: Life,
}

impl Block {
    fn rounded(&self) -> u64 {
        self.bytes.next_multiple_of(512)
    }

    fn probes(&self) -> impl Iterator<Item = *mut u8> {
        let at = self.at;
        (0..self.bytes).step_by(512).chain([self.bytes - 1]).map(move |offset| (at + offset) as *mut u8)
    }

    fn write(&self, stamp: u8) {
        self.probes().for_each(|at| unsafe { at.write_volatile(stamp) });
    }

    fn holds(&self, stamp: u8) -> bool {
        self.probes().all(|at| unsafe { at.read_volatile() } == stamp)
    }
}

struct Space {
    /// Null for spaces of vmmgraph_arena_allocate.
    handle: vmmgraph_space_t,
    arena: usize,
    sealed: bool,
    /// Live-out blocks have private pages.
    own: bool,
    current: bool,
    steps: Vec<Step>,
    blocks: Vec<Block>,
    /// Peak of live bytes; persistent blocks count separately.
    peak: u64,
    kept_peak: u64,
    end: u64,
    round: u8,
}

impl Space {
    fn used(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(|block| block.life != Life::Freed)
    }

    fn live(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(|block| block.life == Life::Live)
    }

    fn bytes(&self) -> u64 {
        self.used().map(Block::rounded).sum()
    }

    fn kept_bytes(&self) -> u64 {
        self.used().filter(|block| block.kept).map(Block::rounded).sum()
    }

    fn stamp(&self, id: usize) -> u8 {
        self.round.wrapping_mul(37) ^ (id as u8).wrapping_mul(11) ^ 0x5a
    }

    /// Simulates the graph: writes at allocations, checks at frees. Returns the first overwritten
    /// block.
    fn run(&self) -> Option<usize> {
        let mut parked = Vec::new();
        for step in &self.steps {
            match *step {
                Step::Allocate(id) => self.blocks[id].write(self.stamp(id)),
                Step::Free(id) if !self.blocks[id].holds(self.stamp(id)) => return Some(id),
                Step::Free(id) if self.blocks[id].crossing => parked.push(id),
                Step::Free(_) => {}
            }
        }
        let live = (0..self.blocks.len()).filter(|id| self.blocks[*id].life == Life::Live);
        parked.into_iter().chain(live).find(|id| !self.blocks[*id].holds(self.stamp(*id)))
    }

    fn seal(&mut self, own: bool) {
        (self.sealed, self.own) = (true, own);
        self.blocks
            .iter_mut()
            .filter(|block| block.life == Life::Parked)
            .for_each(|block| block.life = Life::Freed);
    }
}

struct Arena {
    handle: vmmgraph_arena_t,
    own: bool,
    peak: u64,
    budget: u64,
    reserve: u64,
    charged: u64,
}

struct Tensor {
    at: u64,
    bytes: u64,
    policy: i32,
    stamp: Option<u8>,
}

impl Tensor {
    fn rounded(&self) -> u64 {
        self.bytes.next_multiple_of(512)
    }

    fn probes(&self) -> impl Iterator<Item = u64> {
        (0..self.bytes).step_by(512).chain([self.bytes - 1])
    }

    fn write(&mut self, stamp: u8) {
        self.probes().for_each(|offset| unsafe { ((self.at + offset) as *mut u8).write_volatile(stamp) });
        self.stamp = Some(stamp);
    }

    fn holds(&self, stamp: u8) -> bool {
        self.probes().all(|offset| unsafe { ((self.at + offset) as *const u8).read_volatile() } == stamp)
    }

    fn check_backup(&self, region: vmmgraph_region_t, there: bool) {
        let mut into = vec![0xee_u8; self.rounded() as usize];
        let (block, length) = (self.at as *mut c_void, into.len());
        let status =
            unsafe { vmmgraph_region_get_backup(region, block, 0, into.as_mut_ptr().cast(), length) };
        if !there {
            assert_eq!(status, VMMGRAPH_ERROR_WRONG_STATE);
            return assert!(into == vec![0xee; length], "a refused read wrote");
        }
        assert_eq!(status, VMMGRAPH_OK, "{}", message());
        if let Some(stamp) = self.stamp {
            let wrong = self.probes().find(|offset| into[*offset as usize] != stamp);
            assert_eq!(wrong, None, "of {} bytes of a backup", self.bytes);
        }
    }
}

struct Aside {
    handle: vmmgraph_region_t,
    read_only: bool,
    paused: bool,
    blocks: Vec<Tensor>,
}

struct World {
    device: vmmgraph_device_t,
    arenas: Vec<Arena>,
    spaces: Vec<Space>,
    regions: Vec<Aside>,
    budget: u64,
}

struct Launch<'a> {
    space: &'a Space,
    launched: bool,
    wrong: Option<usize>,
}

unsafe extern "C" fn launch(user: *mut c_void) {
    let launch = unsafe { &mut *user.cast::<Launch>() };
    launch.launched = true;
    launch.wrong = launch.space.run();
}

/// On this platform, work refused during a capture stays pending until a retry.
fn waits_later() -> bool {
    platforms::platform().name == "ascend"
}

fn handle_of(stream: u64) -> *mut c_void {
    platforms::streams(ORDINAL)[stream as usize % 3] as *mut c_void
}

fn last() -> vmmgraph_error_info_t {
    let mut info = sized!(vmmgraph_error_info_t);
    assert_eq!(unsafe { vmmgraph_last_error(&raw mut info) }, VMMGRAPH_OK);
    info
}

fn message() -> String {
    let mut text = [0 as c_char; 256];
    assert_eq!(
        unsafe { vmmgraph_last_error_message(text.as_mut_ptr(), text.len(), null_mut()) },
        VMMGRAPH_OK
    );
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap().to_owned()
}

fn open_device() -> vmmgraph_device_t {
    let mut options = sized!(vmmgraph_device_options_t);
    (options.driver, options.device) = (platforms::platform().number, ORDINAL);
    if options.driver == VMMGRAPH_DRIVER_HOST {
        (options.host_granularity_bytes, options.host_memory_bytes) = (4096, MEMORY);
    }
    let mut device = null_mut();
    assert_eq!(unsafe { vmmgraph_device_open(&raw const options, &raw mut device) }, VMMGRAPH_OK);
    device
}

impl World {
    fn new() -> Self {
        Self { device: open_device(), arenas: Vec::new(), spaces: Vec::new(), regions: Vec::new(), budget: 0 }
    }

    /// Closes and opens the device: the same device, with its budget, while objects of it live.
    fn reopen(&mut self) {
        let before = self.device();
        assert_eq!(vmmgraph_device_close(self.device), VMMGRAPH_OK);
        self.device = open_device();
        let after = self.device();
        let none = self.spaces.is_empty() && self.regions.is_empty();
        if none && self.arenas.iter().all(|arena| arena.handle.is_null()) {
            self.budget = 0;
            return assert_eq!((after.pages_created, after.physical_bytes), (0, 0));
        }
        assert_eq!(
            (after.pages_created, after.maps, after.physical_bytes),
            (before.pages_created, before.maps, before.physical_bytes)
        );
    }

    fn device(&self) -> vmmgraph_device_stats_t {
        let mut stats = sized!(vmmgraph_device_stats_t);
        assert_eq!(unsafe { vmmgraph_device_stats(self.device, &raw mut stats) }, VMMGRAPH_OK);
        stats
    }

    fn arena(&self, arena: usize) -> vmmgraph_arena_stats_t {
        let mut stats = sized!(vmmgraph_arena_stats_t);
        assert_eq!(unsafe { vmmgraph_arena_stats(self.arenas[arena].handle, &raw mut stats) }, VMMGRAPH_OK);
        stats
    }

    fn lacking(&self, arena: usize, status: i32) {
        let info = last();
        assert_eq!((info.status, info.device), (status, ORDINAL));
        assert!(
            info.requested > info.available,
            "{} bytes were there for {}",
            info.available,
            info.requested
        );
        match status {
            VMMGRAPH_ERROR_OUT_OF_MEMORY => {}
            VMMGRAPH_ERROR_OVER_BUDGET => {
                let text = message();
                let whose = if text.contains("of arena") { self.arenas[arena].budget } else { self.budget };
                assert!(whose > 0 && text.contains(&format!("of {whose} bytes held")), "{text}");
            }
            other => panic!("status {other}"),
        }
    }

    fn make_region(&mut self, read_only: bool) -> usize {
        let mut options = sized!(vmmgraph_region_options_t);
        options.policy = VMMGRAPH_POLICY_BACKUP;
        options.flags = if read_only { VMMGRAPH_REGION_READ_ONLY } else { 0 };
        let mut handle = null_mut();
        let status = unsafe {
            vmmgraph_region_create(self.device, c"weights".as_ptr(), &raw const options, &raw mut handle)
        };
        assert_eq!(status, VMMGRAPH_OK);
        self.regions.push(Aside { handle, read_only, paused: false, blocks: Vec::new() });
        self.regions.len() - 1
    }

    /// Several blocks of one length, most of them across page boundaries.
    fn allocate_in_region(&mut self, input: &mut Input) {
        let region = match input.below(3) {
            new if new >= self.regions.len() => self.make_region(new == 1),
            region => region,
        };
        let (bytes, count) = (input.pick(&[5000, 3000, 9000, 700, 40 << 10, 300_000]), 1 + input.below(24));
        let backup = VMMGRAPH_POLICY_BACKUP;
        let policy = input.pick(&[
            backup,
            backup,
            VMMGRAPH_POLICY_ZERO,
            VMMGRAPH_POLICY_KEEP,
            VMMGRAPH_POLICY_DISCARD,
        ]);
        for _ in 0..count {
            let stream = handle_of(0);
            let mut block = null_mut();
            let Aside { handle, paused, .. } = self.regions[region];
            let status = unsafe { vmmgraph_region_allocate(handle, bytes, policy, stream, &raw mut block) };
            match status {
                VMMGRAPH_OK => assert!(!paused),
                VMMGRAPH_ERROR_WRONG_STATE => return assert!(paused),
                VMMGRAPH_ERROR_OUT_OF_MEMORY | VMMGRAPH_ERROR_OVER_BUDGET => {
                    let info = last();
                    return assert!(info.requested > info.available);
                }
                other => panic!("status {other}"),
            }
            let region = &mut self.regions[region];
            let mut new = Tensor { at: block as u64, bytes, policy, stamp: None };
            for other in &region.blocks {
                assert!(new.at + new.rounded() <= other.at || other.at + other.rounded() <= new.at);
            }
            new.write((region.blocks.len() as u8).wrapping_mul(11) ^ 0x5a);
            region.blocks.push(new);
        }
    }

    fn change_region(&mut self, input: &mut Input) {
        let (which, how, pick) = (input.below(self.regions.len()), input.below(8), input.byte());
        let Some(region) = self.regions.get_mut(which) else { return };
        let Aside { handle, paused, .. } = *region;
        if how == 0 {
            assert_eq!(vmmgraph_region_destroy(handle), VMMGRAPH_OK);
            self.regions.swap_remove(which);
            return;
        }
        if region.blocks.is_empty() {
            return;
        }
        let block = usize::from(pick) % region.blocks.len();
        let at = region.blocks[block].at as *mut c_void;
        if how < 4 {
            let status = vmmgraph_region_mark_written(handle, at);
            assert_eq!(status, if paused { VMMGRAPH_ERROR_WRONG_STATE } else { VMMGRAPH_OK });
            if !paused {
                region.blocks[block].write(pick ^ 0xc3);
            }
            return;
        }
        for _ in 0..how - 3 {
            if block < region.blocks.len() {
                let gone = region.blocks.swap_remove(block);
                assert_eq!(vmmgraph_region_free(handle, gone.at as *mut c_void), VMMGRAPH_OK);
                let again = vmmgraph_region_free(handle, gone.at as *mut c_void);
                assert!([VMMGRAPH_ERROR_DOUBLE_FREE, VMMGRAPH_ERROR_FOREIGN_POINTER].contains(&again));
            }
        }
    }

    fn pause_region(&mut self, which: usize) {
        let cannot_wait = self.cannot_wait();
        let Some(region) = self.regions.get_mut(which) else { return };
        match unsafe { vmmgraph_region_pause(region.handle, ptr::null(), null_mut()) } {
            VMMGRAPH_OK => region.paused = true,
            VMMGRAPH_ERROR_STREAM_CAPTURING => assert!(cannot_wait),
            other => panic!("status {other}: {}", message()),
        }
    }

    fn resume_region(&mut self, which: usize, short: bool) {
        let cannot_wait = self.cannot_wait();
        let Some(region) = self.regions.get_mut(which) else { return };
        let budget = |bytes| assert_eq!(vmmgraph_device_set_budget(self.device, bytes), VMMGRAPH_OK);
        budget(if short { 1 } else { self.budget });
        let status = unsafe { vmmgraph_region_resume(region.handle, 0, null_mut()) };
        budget(self.budget);
        match status {
            VMMGRAPH_OK => {}
            VMMGRAPH_ERROR_STREAM_CAPTURING => return assert!(cannot_wait),
            VMMGRAPH_ERROR_OUT_OF_MEMORY | VMMGRAPH_ERROR_OVER_BUDGET => return assert!(region.paused),
            other => panic!("status {other}: {}", message()),
        }
        if !std::mem::take(&mut region.paused) {
            return;
        }
        for block in &mut region.blocks {
            match block.policy {
                VMMGRAPH_POLICY_DISCARD => block.stamp = None,
                VMMGRAPH_POLICY_ZERO => {
                    assert!(block.holds(0));
                    block.stamp = Some(0);
                }
                _ => {}
            }
        }
    }

    fn check_regions(&self) -> u64 {
        let mut resident = 0;
        for region in &self.regions {
            let mut stats = sized!(vmmgraph_region_stats_t);
            assert_eq!(unsafe { vmmgraph_region_stats(region.handle, &raw mut stats) }, VMMGRAPH_OK);
            let live: u64 = region.blocks.iter().map(Tensor::rounded).sum();
            assert_eq!(
                (stats.paused, stats.blocks, stats.live_bytes),
                (u64::from(region.paused), region.blocks.len() as u64, live)
            );
            assert_eq!(stats.charged_bytes, stats.resident_bytes);
            if !region.paused && !region.read_only {
                assert_eq!(stats.host_bytes, 0);
            }
            resident += stats.resident_bytes;
            for block in &region.blocks {
                let backup = block.policy == VMMGRAPH_POLICY_BACKUP;
                block.check_backup(region.handle, region.paused && backup);
                if !region.paused || block.policy == VMMGRAPH_POLICY_KEEP {
                    let right = block.stamp.is_none_or(|stamp| block.holds(stamp));
                    assert!(right, "a block of {} bytes, policy {}", block.bytes, block.policy);
                }
            }
        }
        resident
    }

    fn make_arena(&mut self, input: &mut Input) {
        if self.arenas.len() >= 4 {
            return;
        }
        let mut options = sized!(vmmgraph_arena_options_t);
        (options.small_page_bytes, options.large_page_bytes) =
            input.pick(&[(4096, 16 << 10), (16 << 10, 128 << 10), (8192, 8192)]);
        options.retain =
            input.pick(&[VMMGRAPH_RETAIN_DEFAULT, VMMGRAPH_RETAIN_OWN_PAGES, VMMGRAPH_RETAIN_SHARED_PAGES]);
        let reserve = input.pick(&[0, 0, 0, 1 << 20]);
        options.reserve_bytes = reserve;
        let mut handle = null_mut();
        let status = unsafe { vmmgraph_arena_create(self.device, &raw const options, &raw mut handle) };
        assert_eq!(status, VMMGRAPH_OK);
        let own = options.retain != VMMGRAPH_RETAIN_SHARED_PAGES;
        self.arenas.push(Arena { handle, own, peak: 0, budget: 0, reserve, charged: 0 });
        if reserve > 0 {
            self.add(null_mut(), self.arenas.len() - 1);
        }
    }

    fn add(&mut self, handle: vmmgraph_space_t, arena: usize) -> usize {
        let (steps, blocks, current) = (Vec::new(), Vec::new(), handle.is_null());
        self.spaces.push(Space {
            handle,
            arena,
            sealed: false,
            own: false,
            current,
            steps,
            blocks,
            peak: 0,
            kept_peak: 0,
            end: 0,
            round: 0,
        });
        self.spaces.len() - 1
    }

    fn allocate(&mut self, space: usize, bytes: u64, stream: u64, kept: bool) {
        let Space { handle, arena, sealed, .. } = self.spaces[space];
        let untouched = 0xdead as *mut c_void;
        let mut block = untouched;
        let as_stream = handle_of(stream);
        let status = unsafe {
            if handle.is_null() {
                vmmgraph_arena_allocate(self.arenas[arena].handle, bytes, as_stream, &raw mut block)
            } else if kept {
                vmmgraph_space_allocate_kept(handle, bytes, as_stream, &raw mut block)
            } else {
                vmmgraph_space_allocate(handle, bytes, as_stream, &raw mut block)
            }
        };
        if status != VMMGRAPH_OK {
            assert_eq!(block, untouched, "a failed call wrote its output");
            return if sealed {
                assert_eq!(status, VMMGRAPH_ERROR_WRONG_STATE)
            } else {
                self.lacking(arena, status)
            };
        }
        assert!(!sealed);
        let at = block as u64;
        assert!(at.is_multiple_of(512) && at > 0);
        let new = Block { at, bytes, stream, crossing: false, kept, life: Life::Live };
        for other in self.spaces.iter().flat_map(Space::used) {
            let apart = at + new.rounded() <= other.at || other.at + other.rounded() <= at;
            assert!(apart, "{at:#x} + {bytes} lies over {:#x} + {}", other.at, other.bytes);
        }
        let space = &mut self.spaces[space];
        space.steps.push(Step::Allocate(space.blocks.len()));
        space.blocks.push(new);
        space.peak = space.peak.max(space.bytes() - space.kept_bytes());
        space.kept_peak = space.kept_peak.max(space.kept_bytes());
        if kept {
            return;
        }
        space.end += bytes.next_multiple_of(512);
        // A bump space needs all bytes handed out, any other the live peak.
        let needed = if space.current || space.handle.is_null() { space.end } else { space.peak };
        self.arenas[arena].peak = self.arenas[arena].peak.max(needed);
    }

    fn free(&mut self, space: usize, at: u64) {
        let Space { handle, arena, sealed, .. } = self.spaces[space];
        let status = if handle.is_null() {
            vmmgraph_arena_deallocate(self.arenas[arena].handle, at as *mut c_void)
        } else {
            vmmgraph_space_free(handle, at as *mut c_void)
        };
        let space = &mut self.spaces[space];
        let Some(id) = space.blocks.iter().position(|block| block.at == at && block.life == Life::Live)
        else {
            assert!(
                [VMMGRAPH_ERROR_DOUBLE_FREE, VMMGRAPH_ERROR_FOREIGN_POINTER].contains(&status),
                "{status}"
            );
            return assert_eq!(last().requested, at);
        };
        assert_eq!(status, VMMGRAPH_OK);
        let block = &mut space.blocks[id];
        block.life = if block.crossing && !sealed { Life::Parked } else { Life::Freed };
        if !sealed {
            space.steps.push(Step::Free(id));
        }
    }

    fn record_stream(&mut self, space: usize, at: u64, stream: u64) {
        let space = &mut self.spaces[space];
        if space.handle.is_null() {
            return;
        }
        let status =
            unsafe { vmmgraph_space_record_stream(space.handle, at as *mut c_void, handle_of(stream)) };
        let sealed = space.sealed;
        match space.blocks.iter_mut().find(|block| block.at == at && block.life == Life::Live) {
            Some(block) => {
                assert_eq!(status, VMMGRAPH_OK);
                block.crossing |= block.stream != stream && !sealed && !block.kept;
            }
            None => assert!([VMMGRAPH_ERROR_DOUBLE_FREE, VMMGRAPH_ERROR_FOREIGN_POINTER].contains(&status)),
        }
    }

    fn seal(&mut self, space: usize, retain: i32) {
        let mut report = sized!(vmmgraph_seal_report_t);
        let found = &self.spaces[space];
        if found.handle.is_null() {
            return;
        }
        let status = unsafe { vmmgraph_space_seal(found.handle, retain, &raw mut report) };
        match status {
            VMMGRAPH_OK => {
                assert!(!found.sealed);
                assert_eq!(
                    (report.retained_blocks, report.peak_live_bytes),
                    (found.live().count() as u64, found.peak + found.kept_peak)
                );
            }
            _ if found.sealed => return assert_eq!(status, VMMGRAPH_ERROR_WRONG_STATE),
            // Live-out blocks lie on shared pages, which this platform cannot replace.
            VMMGRAPH_ERROR_UNSUPPORTED => {
                return assert!(["hip", "mlu"].contains(&platforms::platform().name));
            }
            _ => return self.lacking(found.arena, status),
        }
        let own = match retain {
            VMMGRAPH_RETAIN_DEFAULT => self.arenas[found.arena].own,
            other => other == VMMGRAPH_RETAIN_OWN_PAGES,
        };
        self.spaces[space].seal(own);
    }

    fn replay(&mut self, space: usize, stream: u64, round: u8) {
        if self.spaces[space].handle.is_null() {
            return;
        }
        let before = std::mem::replace(&mut self.spaces[space].round, round | 1);
        let mut user = Launch { space: &self.spaces[space], launched: false, wrong: None };
        let handle = user.space.handle;
        let status =
            unsafe { vmmgraph_space_replay(handle, handle_of(stream), Some(launch), (&raw mut user).cast()) };
        let Launch { launched, wrong, .. } = user;
        assert_eq!(wrong, None, "a block was overwritten while it lived");
        let sealed = self.spaces[space].sealed;
        assert_eq!(
            (status, launched),
            if sealed { (VMMGRAPH_OK, true) } else { (VMMGRAPH_ERROR_WRONG_STATE, false) },
            "{}",
            message()
        );
        if !sealed {
            self.spaces[space].round = before;
        }
        for (index, other) in self.spaces.iter().enumerate().filter(|(_, space)| space.round > 0) {
            let lost = (0..other.blocks.len()).find(|id| {
                let block = &other.blocks[*id];
                let theirs = other.sealed && other.own || block.kept;
                theirs && block.life == Life::Live && !block.holds(other.stamp(*id))
            });
            assert_eq!(lost, None, "a replay of space {space} wrote to what space {index} retained");
        }
    }

    fn switch(&mut self, arena: usize) {
        let status = vmmgraph_arena_switch_to_new_virtual_space(self.arenas[arena].handle);
        let current = self.spaces.iter().position(|space| space.arena == arena && space.current);
        if status != VMMGRAPH_OK {
            assert!(current.is_some());
            return self.lacking(arena, status);
        }
        if let Some(current) = current {
            let own = self.arenas[arena].own;
            self.spaces[current].seal(own);
            self.spaces[current].current = false;
        }
        self.add(null_mut(), arena);
    }

    fn destroy_space(&mut self, space: usize) {
        if !self.spaces[space].handle.is_null() {
            let space = self.spaces.swap_remove(space);
            assert_eq!(vmmgraph_space_destroy(space.handle), VMMGRAPH_OK);
            assert_eq!(vmmgraph_space_destroy(space.handle), VMMGRAPH_ERROR_INVALID_HANDLE);
        }
    }

    fn destroy_arena(&mut self, arena: usize) {
        let handle = std::mem::replace(&mut self.arenas[arena].handle, null_mut());
        assert_eq!(vmmgraph_arena_destroy(handle), VMMGRAPH_OK);
        self.spaces.retain(|space| space.arena != arena || !space.handle.is_null());
    }

    /// True if waits are forbidden now: open spaces are captures.
    fn cannot_wait(&self) -> bool {
        waits_later() && self.spaces.iter().any(|space| !space.sealed)
    }

    /// Retries pending work.
    fn settle(&self) {
        if waits_later() {
            assert_eq!(unsafe { vmmgraph_device_trim(self.device, null_mut()) }, VMMGRAPH_OK);
        }
    }

    fn trim(&self, arena: usize) {
        let (before, mut released) = (self.arena(arena).free_bytes, 0);
        let status = unsafe { vmmgraph_arena_trim(self.arenas[arena].handle, &raw mut released) };
        if status == VMMGRAPH_ERROR_STREAM_CAPTURING {
            return assert!(self.cannot_wait());
        }
        assert_eq!(status, VMMGRAPH_OK);
        assert!(released == before || waits_later() && released > before, "{released} of {before}");
        assert_eq!(self.arena(arena).free_bytes, 0);
    }

    fn shrink(&self, arena: usize) {
        let (before, mut saved) = (self.arena(arena).charged_bytes, 0);
        let handle = self.arenas[arena].handle;
        let status = unsafe { vmmgraph_arena_shrink_to_fit(handle, null(), &raw mut saved) };
        let mut spaces = self.spaces.iter().filter(|space| space.arena == arena);
        match status {
            VMMGRAPH_OK => assert!(self.arena(arena).charged_bytes <= before - saved),
            VMMGRAPH_ERROR_WRONG_STATE => assert!(spaces.any(|space| !space.sealed)),
            VMMGRAPH_ERROR_STREAM_CAPTURING => assert!(self.cannot_wait()),
            VMMGRAPH_ERROR_UNSUPPORTED => assert!(["hip", "mlu"].contains(&platforms::platform().name)),
            _ => self.lacking(arena, status),
        }
    }

    fn act(&mut self, input: &mut Input) {
        let arenas: Vec<usize> =
            (0..self.arenas.len()).filter(|arena| !self.arenas[*arena].handle.is_null()).collect();
        // The last bytes of each row were added later: old inputs keep their meaning.
        let op = match input.byte() {
            byte @ 0..216 => byte % 24,
            byte @ 216..236 => 24 + (byte - 216) % 4,
            byte @ 236..252 => 28 + (byte - 236) % 5,
            _ => 33,
        };
        match op {
            28..=29 => return self.allocate_in_region(input),
            30 => return self.change_region(input),
            31 => return self.pause_region(input.below(self.regions.len())),
            32 => {
                let (which, short) = (input.below(self.regions.len()), input.below(3) == 0);
                return self.resume_region(which, short);
            }
            _ => {}
        }
        if self.spaces.is_empty() && op >= 4 || arenas.is_empty() {
            if arenas.is_empty() {
                self.make_arena(input);
            }
            let Some(arena) = (0..self.arenas.len()).rfind(|arena| !self.arenas[*arena].handle.is_null())
            else {
                return;
            };
            return self.open(arena);
        }
        let arena = input.pick(&arenas);
        let space = input.below(self.spaces.len());
        let known = |world: &Self, input: &mut Input| {
            let blocks = &world.spaces[space].blocks;
            let pick = input.below(blocks.len());
            blocks.get(pick).map(|block| block.at)
        };
        match op {
            0 => self.make_arena(input),
            1 => self.open(arena),
            2 => {
                let current = self.spaces.iter().position(|space| space.arena == arena && space.current);
                let bytes = input.pick(&SIZES);
                let space = current.unwrap_or_else(|| self.add(null_mut(), arena));
                self.allocate(space, bytes, 0, false);
            }
            3 => self.switch(arena),
            _ if self.spaces.is_empty() => {}
            4..=10 => {
                let (bytes, stream) = (input.pick(&SIZES), input.below(3) as u64);
                if !self.spaces[space].handle.is_null() {
                    self.allocate(space, bytes, stream, false);
                }
            }
            11..=14 => drop(known(self, input).map(|at| self.free(space, at))),
            15 => drop(known(self, input).map(|at| self.record_stream(space, at, 2))),
            16..=17 => self.seal(space, input.below(3) as i32),
            18..=19 => {
                let stream = input.below(3) as u64;
                self.replay(space, stream, input.byte());
            }
            20 => self.destroy_space(space),
            21 => self.trim(arena),
            22 => {
                let which = input.below(8);
                let budget = [0, 100 << 10, 1 << 20, 4 << 20][which % 4];
                let status = if which < 4 {
                    self.budget = budget;
                    vmmgraph_device_set_budget(self.device, budget)
                } else {
                    self.arenas[arena].budget = budget;
                    vmmgraph_arena_set_budget(self.arenas[arena].handle, budget)
                };
                assert_eq!(status, VMMGRAPH_OK);
            }
            24..=25 => {
                let (bytes, stream) = (input.pick(&SIZES), input.below(3) as u64);
                if !self.spaces[space].handle.is_null() {
                    self.allocate(space, bytes, stream, true);
                }
            }
            26 => self.reopen(),
            33 => self.shrink(arena),
            27 => {
                let stream = input.below(3) as u64;
                if let Some(at) = known(self, input) {
                    self.record_stream(space, at, stream);
                }
            }
            _ if input.below(4) == 0 => self.destroy_arena(arena),
            _ => assert_eq!(vmmgraph_arena_mark(self.arenas[arena].handle), VMMGRAPH_OK),
        }
    }

    fn open(&mut self, arena: usize) {
        let mut handle = null_mut();
        assert_eq!(unsafe { vmmgraph_space_open(self.arenas[arena].handle, &raw mut handle) }, VMMGRAPH_OK);
        self.add(handle, arena);
    }

    /// No arena exceeds its budget, except with memory from before.
    fn keeps_budgets(&mut self) {
        for index in 0..self.arenas.len() {
            if self.arenas[index].handle.is_null() {
                continue;
            }
            let charged = self.arena(index).charged_bytes;
            let arena = &mut self.arenas[index];
            let before = std::mem::replace(&mut arena.charged, charged);
            assert!(
                arena.budget == 0 || charged <= arena.budget.max(before),
                "{charged} of {}",
                arena.budget
            );
        }
    }

    fn check(&self) {
        for space in self.spaces.iter().filter(|space| !space.handle.is_null()) {
            let mut stats = sized!(vmmgraph_space_stats_t);
            assert_eq!(unsafe { vmmgraph_space_stats(space.handle, &raw mut stats) }, VMMGRAPH_OK);
            let used = (space.used().count() as u64, space.bytes(), space.peak + space.kept_peak);
            assert_eq!((stats.blocks, stats.live_bytes, stats.peak_live_bytes), used);
            assert_eq!(stats.phase, if space.sealed { VMMGRAPH_SPACE_SEALED } else { VMMGRAPH_SPACE_OPEN });
            assert!(stats.mapped_bytes <= stats.reserved_bytes && stats.retained_bytes <= stats.mapped_bytes);
            if !(space.own && space.live().next().is_some()) {
                assert!(stats.retained_bytes == 0 || waits_later());
            }
            let (mut blocks, mut count) = (vec![null_mut(); space.blocks.len()], 0);
            let status = unsafe {
                vmmgraph_space_live_blocks(space.handle, blocks.as_mut_ptr(), blocks.len(), &raw mut count)
            };
            let mut live: Vec<u64> = space.live().map(|block| block.at).collect();
            live.sort_unstable();
            assert_eq!((status, count), (VMMGRAPH_OK, live.len()));
            assert!(blocks.iter().map(|block| *block as u64).take(count).eq(live));
        }
        let (mut physical, mut retained, mut all) = (self.check_regions(), 0, true);
        let device = self.device();
        for (index, arena) in self.arenas.iter().enumerate() {
            let spaces: Vec<_> = self.spaces.iter().filter(|space| space.arena == index).collect();
            if arena.handle.is_null() {
                all &= spaces.is_empty();
                continue;
            }
            let stats = self.arena(index);
            assert_eq!(stats.spaces, spaces.len() as u64);
            assert_eq!(stats.blocks, spaces.iter().map(|space| space.used().count() as u64).sum::<u64>());
            assert_eq!(stats.live_bytes, spaces.iter().map(|space| space.bytes()).sum::<u64>());
            let current = spaces.iter().find(|space| space.current).map_or(0, |space| space.end);
            assert_eq!(
                (stats.current_offset_bytes, stats.high_water_bytes, stats.closed),
                (current, arena.peak, 0)
            );
            assert_eq!(stats.physical_bytes, stats.shared_bytes + stats.retained_bytes + stats.kept_bytes);
            assert!(stats.kept_bytes >= spaces.iter().map(|space| space.kept_bytes()).sum());
            assert!(stats.reserved_bytes >= arena.reserve);
            assert_eq!((stats.charged_bytes, stats.budget_bytes), (stats.physical_bytes, arena.budget));
            physical += stats.physical_bytes;
            retained += stats.retained_bytes + stats.kept_bytes;
            assert_eq!(stats.free_bytes, device.free_bytes);
        }
        // Every page belongs to an arena or a space, or is free, unless unmaps are pending.
        if all && device.pending == 0 {
            assert_eq!(
                (device.physical_bytes, device.retained_bytes),
                (physical + device.free_bytes, retained)
            );
        }
        assert!(device.physical_bytes >= physical && device.peak_physical_bytes <= MEMORY);
        assert_eq!(device.pages, device.pages_created - device.pages_released);
        assert_eq!(device.mappings, device.maps - device.unmaps);
        assert!(device.pending == 0 || waits_later());
        assert_eq!(device.budget_bytes, self.budget);
    }

    fn end(&mut self, input: &mut Input) {
        while let Some(last) = self.arenas.iter().rposition(|arena| !arena.handle.is_null()) {
            let mut open = (0..self.spaces.len()).filter(|space| !self.spaces[*space].handle.is_null());
            match open.nth(input.below(4)) {
                Some(space) => self.destroy_space(space),
                None => self.destroy_arena(last),
            }
        }
        while !self.spaces.is_empty() {
            self.destroy_space(0);
        }
        // Their pages are free until a trim, or until an arena ends.
        let trims = !self.regions.is_empty();
        while let Some(region) = self.regions.pop() {
            assert_eq!(vmmgraph_region_destroy(region.handle), VMMGRAPH_OK);
        }
        if trims {
            assert_eq!(unsafe { vmmgraph_device_trim(self.device, null_mut()) }, VMMGRAPH_OK);
        }
        self.settle();
        let left = self.device();
        assert_eq!((left.physical_bytes, left.pages, left.mappings, left.reservations), (0, 0, 0, 0));
        assert_eq!((left.reserved_bytes, left.pending, left.free_bytes), (0, 0, 0));
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for space in &self.spaces {
            vmmgraph_space_destroy(space.handle);
        }
        for arena in &self.arenas {
            vmmgraph_arena_destroy(arena.handle);
        }
        for region in &self.regions {
            vmmgraph_region_destroy(region.handle);
        }
        vmmgraph_device_close(self.device);
    }
}

/// Logged errors: a failed undo, or a failed audit (debug builds).
static ERRORS: Mutex<Vec<String>> = Mutex::new(Vec::new());

unsafe extern "C" fn error_logged(_: i32, text: *const c_char, length: usize, _: *mut c_void) {
    let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
    ERRORS.lock().unwrap().push(String::from_utf8_lossy(text).into_owned());
}

#[test]
fn valid_calls_do_what_the_model_says() {
    let _alone = alone();
    let status = unsafe { vmmgraph_set_log_sink(Some(error_logged), null_mut(), None, VMMGRAPH_LOG_ERROR) };
    assert_eq!(status, VMMGRAPH_OK);
    platforms::beside_a_capture(|| crate::input::fuzz("model", calls));
}

fn calls(input: &mut Input) {
    let mut world = World::new();
    let mut turns = 0;
    while !input.is_empty() && turns < 200 {
        world.act(input);
        world.check();
        world.keeps_budgets();
        let errors = std::mem::take(&mut *ERRORS.lock().unwrap());
        assert!(errors.is_empty(), "{errors:?}");
        turns += 1;
    }
    world.end(input);
}

#[test]
fn every_platform_does_what_the_model_says() {
    platforms::on_stand_ins(module_path!(), "valid_calls_do_what_the_model_says", MEMORY);
}
