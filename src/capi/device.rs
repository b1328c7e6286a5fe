use std::ffi::{c_char, c_void};

use super::arena::stream_of;
use super::guard::{guard, out};
use super::handle::{get, register, remove};
use super::log::start;
use super::sized::{OutStruct, options};
use super::status::vmmgraph_status_t;
use super::text::copy_text;
use crate::driver::platform::{number_of, numbered};
use crate::error::Error;
use crate::units::Peers;
use crate::{Device, DeviceOptions, DriverChoice, Handles};

pub struct vmmgraph_device {
    _private: (),
}

/// Device: its driver and its page pool.
pub type vmmgraph_device_t = *mut vmmgraph_device;

/// VMMGRAPH_DRIVER in the environment (cuda, hip, ascend, mlu or host), else the first of these but
/// host with a usable device. The message of VMMGRAPH_ERROR_DRIVER_MISSING has each platform's
/// reason.
pub const VMMGRAPH_DRIVER_AUTO: i32 = 0;
/// CUDA.
pub const VMMGRAPH_DRIVER_CUDA: i32 = 1;
/// Memory of this machine; addresses are ordinary pointers of this process.
pub const VMMGRAPH_DRIVER_HOST: i32 = 2;
/// HIP on AMD GPUs, ROCm 6.2 and later. Never run on a device: see README.
pub const VMMGRAPH_DRIVER_HIP: i32 = 3;
/// Ascend NPUs through CANN's ACL runtime, 8.5 and later. Never run on a device: see README.
pub const VMMGRAPH_DRIVER_ASCEND: i32 = 4;
/// Cambricon MLUs through CNDrv 2.15. Never run on a device, nor checked against the vendor's
/// header: see README.
pub const VMMGRAPH_DRIVER_MLU: i32 = 5;

/// Pages cannot be exported.
pub const VMMGRAPH_SHARING_NONE: i32 = 0;
/// Pages can be exported as POSIX file descriptors, created on export. Not on HIP, Ascend and MLU.
pub const VMMGRAPH_SHARING_FD: i32 = 1;
/// Pages can also be exported as fabric handles, which reach other hosts, if the device can make
/// one when opened.
pub const VMMGRAPH_SHARING_FABRIC: i32 = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_device_options_t {
    pub struct_size: usize,
    /// One of VMMGRAPH_DRIVER_*.
    pub driver: i32,
    /// Device number of the driver, from 0.
    pub device: i32,
    /// See vmmgraph_device_set_budget; 0 leaves the budget of an open device unchanged.
    pub budget_bytes: u64,
    /// Host driver: mapping granularity, a power of two; 0: 2 MiB.
    pub host_granularity_bytes: u64,
    /// Host driver: bytes of the device; 0: this machine's memory.
    pub host_memory_bytes: u64,
    /// VMMGRAPH_SHARING_*. Opening fails if the device cannot, or is open without it; a device
    /// without fabric grants _FD for _FABRIC. With NCCL_GRAPH_REGISTER=0 in the environment, _NONE
    /// also grants _FD where possible: NCCL then registers no captured buffers.
    pub sharing: i32,
    /// 1: network cards may read and write the pages (gpuDirectRDMACapable of CUDA, slower maps).
    /// Opening fails if the device cannot, or is open without RDMA.
    pub rdma: i32,
    /// As peers of vmmgraph_arena_options_t, for all pages. Applies at once to an open device.
    pub peers: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_device_info_t {
    pub struct_size: usize,
    /// One of VMMGRAPH_DRIVER_*.
    pub driver: i32,
    pub device: i32,
    /// Lengths and addresses of mappings are multiples of this number.
    pub granularity_bytes: u64,
    pub total_bytes: u64,
    pub name: [c_char; 128],
    /// Granted sharing, VMMGRAPH_SHARING_*.
    pub sharing: i32,
    /// 1 if network cards may read and write the pages, else 0.
    pub rdma: i32,
    /// Devices with access to all pages, as in the options.
    pub peers: u64,
}

/// Statistics of a device's page pool since the device was opened.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_device_stats_t {
    pub struct_size: usize,
    /// Pages held from the driver.
    pub physical_bytes: u64,
    pub peak_physical_bytes: u64,
    /// Pages of single spaces, and of persistent (kept) and private (exclusive) blocks.
    pub retained_bytes: u64,
    /// Free pages, which are mapped nowhere.
    pub free_bytes: u64,
    pub budget_bytes: u64,
    pub pages: u64,
    pub pages_created: u64,
    pub pages_released: u64,
    /// Current mappings.
    pub mappings: u64,
    /// Mappings made.
    pub maps: u64,
    /// Mappings removed.
    pub unmaps: u64,
    /// Bytes of reserved addresses.
    pub reserved_bytes: u64,
    /// Current address reservations.
    pub reservations: u64,
    /// Resources waiting for the device or refused by the driver; a trim retries both.
    pub pending: u64,
    /// Free pages reused without a driver call.
    pub pages_reused: u64,
    /// Pages pinned for other processes.
    pub exported_bytes: u64,
}

fn handles_of(number: i32) -> Result<Handles, Error> {
    match number {
        VMMGRAPH_SHARING_NONE => Ok(Handles::None),
        VMMGRAPH_SHARING_FD => Ok(Handles::Fd),
        VMMGRAPH_SHARING_FABRIC => Ok(Handles::Fabric),
        _ => {
            let expected = "VMMGRAPH_SHARING_NONE, VMMGRAPH_SHARING_FD or VMMGRAPH_SHARING_FABRIC";
            Err(Error::InvalidArgument { what: "sharing", value: number.into(), expected })
        }
    }
}

fn number_of_handles(handles: Handles) -> i32 {
    match handles {
        Handles::None => VMMGRAPH_SHARING_NONE,
        Handles::Fd => VMMGRAPH_SHARING_FD,
        Handles::Fabric => VMMGRAPH_SHARING_FABRIC,
    }
}

/// Opens a device, or returns another handle to its page pool. `options` may be null.
/// VMMGRAPH_ERROR_DEVICE_IN_USE if the device is open with other settings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_open(
    options: *const vmmgraph_device_options_t,
    device: *mut vmmgraph_device_t,
) -> vmmgraph_status_t {
    guard(|| {
        start();
        // SAFETY: contract.
        let (given, device) = (unsafe { self::options(options) }?, unsafe { out(device, "device") }?);
        let mut asked = DeviceOptions::default();
        let mut budget = None;
        let (mut choice, mut ordinal) = (DriverChoice::Auto, 0);
        if let Some(given) = given {
            if given.driver != VMMGRAPH_DRIVER_AUTO {
                let unknown = || Error::InvalidArgument {
                    what: "driver",
                    value: i128::from(given.driver),
                    expected: "VMMGRAPH_DRIVER_AUTO or the number of a platform, such as VMMGRAPH_DRIVER_HOST",
                };
                choice = DriverChoice::Named(numbered(given.driver).ok_or_else(unknown)?.name);
            }
            ordinal = given.device;
            budget = (given.budget_bytes > 0).then_some(given.budget_bytes);
            if given.host_granularity_bytes > 0 {
                asked.host.granularity = given.host_granularity_bytes;
            }
            if given.host_memory_bytes > 0 {
                asked.host.memory_bytes = given.host_memory_bytes;
            }
            asked.sharing = handles_of(given.sharing)?;
            asked.rdma = match given.rdma {
                0 => false,
                1 => true,
                value => {
                    Err(Error::InvalidArgument { what: "rdma", value: value.into(), expected: "0 or 1" })?
                }
            };
            asked.peers = Peers::of_bits(given.peers);
        }
        let opened = Device::open(choice, ordinal, asked)?;
        if budget.is_some() {
            opened.set_budget(budget);
        }
        *device = register(opened);
        Ok(())
    })
}

/// Destroys the handle. The device closes once all its objects and handles are destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_close(device: vmmgraph_device_t) -> vmmgraph_status_t {
    guard(|| remove::<Device, _>(device).map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_info(
    device: vmmgraph_device_t,
    info: *mut vmmgraph_device_info_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let info = unsafe { OutStruct::new(info, "info") }?;
        let found = device.driver().info();
        let mut name = [0; 128];
        // SAFETY: the array has the length given.
        unsafe { copy_text(&found.name, name.as_mut_ptr(), name.len(), std::ptr::null_mut()) };
        info.write(vmmgraph_device_info_t {
            struct_size: info.struct_size,
            driver: number_of(found.platform),
            device: found.ordinal,
            granularity_bytes: device.driver().capabilities().granularity,
            total_bytes: found.total_bytes,
            name,
            sharing: number_of_handles(device.sharing()),
            rdma: device.rdma().into(),
            peers: device.peers().bits(),
        });
        Ok(())
    })
}

/// Limits the physical memory of the page pool.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_set_budget(device: vmmgraph_device_t, bytes: u64) -> vmmgraph_status_t {
    guard(|| {
        get::<Device, _>(device)?.set_budget((bytes > 0).then_some(bytes));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_stats(
    device: vmmgraph_device_t,
    stats: *mut vmmgraph_device_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let now = device.stats();
        stats.write(vmmgraph_device_stats_t {
            struct_size: stats.struct_size,
            physical_bytes: now.physical_bytes,
            peak_physical_bytes: now.peak_physical_bytes,
            retained_bytes: now.retained_bytes,
            free_bytes: now.free_bytes,
            budget_bytes: now.budget_bytes.unwrap_or(0),
            pages: now.pages,
            pages_created: now.pages_created,
            pages_released: now.pages_released,
            mappings: now.mappings,
            maps: now.maps,
            unmaps: now.unmaps,
            reserved_bytes: now.reserved_bytes,
            reservations: now.reservations,
            pending: now.pending,
            pages_reused: now.pages_reused,
            exported_bytes: now.exported_bytes,
        });
        Ok(())
    })
}

/// Marks every arena with its last replay on `stream`, as vmmgraph_space_mark. Call before code
/// captures or destroys `stream`, so that other threads can replay in these arenas. Tries all
/// arenas; returns the first error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_mark(
    device: vmmgraph_device_t,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<Device, _>(device)?.mark(stream_of(stream))?))
}

/// Announces a capture on this device without a space, whose graph may read blocks of sealed
/// spaces: blocks freed from now on are not reused by earlier graphs, eager work or leases while
/// the graph writing them exists. torch's captures with VmmGraph's block allocator call this
/// function.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_note_capture(device: vmmgraph_device_t) -> vmmgraph_status_t {
    guard(|| {
        get::<Device, _>(device)?.note_capture();
        Ok(())
    })
}

/// Waits for pending unmaps, releases the device's free pages, and retries refused releases.
/// `released` receives the bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_trim(
    device: vmmgraph_device_t,
    released: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let bytes = get::<Device, _>(device)?.trim()?;
        if !released.is_null() {
            // SAFETY: writable by the caller's contract.
            unsafe { *released = bytes };
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::platform::PLATFORMS;

    #[test]
    fn every_platform_has_a_number_of_its_own_which_stays() {
        let numbers = [
            ("cuda", VMMGRAPH_DRIVER_CUDA),
            ("hip", VMMGRAPH_DRIVER_HIP),
            ("ascend", VMMGRAPH_DRIVER_ASCEND),
            ("mlu", VMMGRAPH_DRIVER_MLU),
            ("host", VMMGRAPH_DRIVER_HOST),
        ];
        for (name, number) in numbers {
            assert_eq!((number_of(name), numbered(number).map(|found| found.name)), (number, Some(name)));
        }
        for platform in PLATFORMS {
            let same = PLATFORMS.iter().filter(|other| other.number == platform.number).count();
            assert!(platform.number > 0 && same == 1, "{}", platform.name);
        }
        assert!(numbered(VMMGRAPH_DRIVER_AUTO).is_none() && number_of("gpu") == 0);
    }
}
