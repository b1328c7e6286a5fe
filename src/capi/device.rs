//! Devices.

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

/// Never defined: a vmmgraph_device_t is a key, not an address.
pub struct vmmgraph_device {
    _private: (),
}

/// A device: its driver and its page pool. Calls with it are thread-safe.
pub type vmmgraph_device_t = *mut vmmgraph_device;

/// Choose by VMMGRAPH_DRIVER (cuda, hip, ascend, mlu or host) if set; else the first of these with a usable device.
pub const VMMGRAPH_DRIVER_AUTO: i32 = 0;
/// CUDA, or an error that says what is missing.
pub const VMMGRAPH_DRIVER_CUDA: i32 = 1;
/// This machine's memory; addresses are ordinary pointers of this process.
pub const VMMGRAPH_DRIVER_HOST: i32 = 2;
/// HIP on AMD GPUs, ROCm 6.2 and newer, or an error that says what is missing. Never run on a device: see README.
pub const VMMGRAPH_DRIVER_HIP: i32 = 3;
/// Ascend NPUs by CANN's ACL runtime, 8.5 and newer, or an error that says what is missing. Never run on a device: see README.
pub const VMMGRAPH_DRIVER_ASCEND: i32 = 4;
/// Cambricon MLUs by CNDrv 2.15, or an error that says what is missing. Never run on a device, nor held against the vendor's header: see
/// README.
pub const VMMGRAPH_DRIVER_MLU: i32 = 5;

/// Pages stay in this process.
pub const VMMGRAPH_SHARING_NONE: i32 = 0;
/// Pages can be exported as POSIX file descriptors, one a page; none is taken before. Not on HIP, Ascend and MLU.
pub const VMMGRAPH_SHARING_FD: i32 = 1;
/// As VMMGRAPH_SHARING_FD, and by handles of the fabric, which reach other hosts, where the device makes one when it is opened.
pub const VMMGRAPH_SHARING_FABRIC: i32 = 2;

/// How to open a device. Zero everything, then set struct_size and what differs from the default; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_device_options_t {
    /// sizeof(vmmgraph_device_options_t).
    pub struct_size: usize,
    /// VMMGRAPH_DRIVER_AUTO, _CUDA, _HIP, _ASCEND, _MLU or _HOST.
    pub driver: i32,
    /// The device's number with that driver, from 0.
    pub device: i32,
    /// Bytes of physical memory the device's page pool may hold; 0: no limit. Set at open and by vmmgraph_device_set_budget.
    pub budget_bytes: u64,
    /// Host driver: mapping granularity in bytes, a power of two; 0: 2 MiB.
    pub host_granularity_bytes: u64,
    /// Host driver: bytes of the device; 0: this machine's memory.
    pub host_memory_bytes: u64,
    /// VMMGRAPH_SHARING_NONE, _FD or _FABRIC: what other processes can be given the device's pages by. Where it cannot be, opening fails; so it does if
    /// the device is open without it. What a device without fabric grants for _FABRIC is _FD, and for _NONE too, where it can and NCCL_GRAPH_REGISTER=0 is
    /// in the environment, which promises that NCCL takes no hold of captured buffers: see vmmgraph_device_info.
    pub sharing: i32,
    /// 1: network cards may read and write its pages (gpuDirectRDMACapable of CUDA, which makes every map dearer). Where that cannot be, opening fails;
    /// so it does if the device is open without it.
    pub rdma: i32,
    /// Other devices of the platform that may read and write all its pages, added up: 1 << n for device n, below 64; at once if it is open. Every map
    /// costs more for each. One without peer access is VMMGRAPH_ERROR_INVALID_ARGUMENT.
    pub peers: u64,
}

/// What does not change about a device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_device_info_t {
    /// Set to sizeof(vmmgraph_device_info_t) before the call.
    pub struct_size: usize,
    /// VMMGRAPH_DRIVER_CUDA, _HIP, _ASCEND, _MLU or _HOST.
    pub driver: i32,
    /// The device's number.
    pub device: i32,
    /// What mapped lengths and addresses are multiples of, in bytes.
    pub granularity_bytes: u64,
    /// Bytes of the device.
    pub total_bytes: u64,
    /// The device's name, zero-terminated.
    pub name: [c_char; 128],
    /// What other processes can be given its pages by: VMMGRAPH_SHARING_NONE, _FD or _FABRIC.
    pub sharing: i32,
    /// Whether network cards may read and write its pages.
    pub rdma: i32,
    /// Other devices that may read and write all its pages, added up: 1 << n for device n.
    pub peers: u64,
}

/// Exact counts of a device's page pool since the device was opened.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_device_stats_t {
    /// Set to sizeof(vmmgraph_device_stats_t) before the call.
    pub struct_size: usize,
    /// Bytes held from the driver now.
    pub physical_bytes: u64,
    /// The most bytes ever held at once.
    pub peak_physical_bytes: u64,
    /// Bytes of pages that belong to single spaces (retained blocks).
    pub retained_bytes: u64,
    /// Bytes of pages that are mapped nowhere.
    pub free_bytes: u64,
    /// The byte budget; 0: none.
    pub budget_bytes: u64,
    /// Pages held now.
    pub pages: u64,
    /// Pages created so far.
    pub pages_created: u64,
    /// Pages given back so far.
    pub pages_released: u64,
    /// Mappings that exist now.
    pub mappings: u64,
    /// Mappings made so far.
    pub maps: u64,
    /// Mappings taken away so far.
    pub unmaps: u64,
    /// Bytes of addresses reserved now.
    pub reserved_bytes: u64,
    /// Reservations that exist now.
    pub reservations: u64,
    /// Things that wait until the device is done with them, and things the driver refused to take back: trim tries both again.
    pub pending: u64,
    /// How often a free page was had without a call to the driver.
    pub pages_reused: u64,
    /// Bytes of pages that other processes have too: they stay until that is over.
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

/// Opens a device. Opening one again gives another handle to the same page pool. `options` may be null.
///
/// # Safety
/// `options` is null or points to a struct whose struct_size is set; `device` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_open(
    options: *const vmmgraph_device_options_t,
    device: *mut vmmgraph_device_t,
) -> vmmgraph_status_t {
    guard(|| {
        start();
        // SAFETY: the caller's contract.
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

/// Ends a handle. The device itself closes when its arenas and other handles are gone too.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_close(device: vmmgraph_device_t) -> vmmgraph_status_t {
    guard(|| remove::<Device, _>(device).map(drop))
}

/// What does not change about the device.
///
/// # Safety
/// `info` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_info(
    device: vmmgraph_device_t,
    info: *mut vmmgraph_device_info_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
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

/// Limits the bytes of physical memory the device's page pool may hold; 0: no limit. Nothing is taken away.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_set_budget(device: vmmgraph_device_t, bytes: u64) -> vmmgraph_status_t {
    guard(|| {
        get::<Device, _>(device)?.set_budget((bytes > 0).then_some(bytes));
        Ok(())
    })
}

/// The counts of the device's page pool as they are now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_stats(
    device: vmmgraph_device_t,
    stats: *mut vmmgraph_device_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
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

/// Before a stream is captured or destroyed, by whomever: arenas whose last replay was there are marked behind it, so that other threads may replay in
/// them meanwhile. As vmmgraph_space_mark in each of those; the first error, after all were tried.
///
/// # Safety
/// `stream` is a stream of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_mark(
    device: vmmgraph_device_t,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<Device, _>(device)?.mark(stream_of(stream))?))
}

/// A capture begins on this device for which no space was opened, by whomever: its graph may read blocks of spaces that are sealed already. What is freed
/// from now on is there for it as for the graphs of spaces captured meanwhile. Where the blocks route into libtorch is installed, captures through libtorch say so by themselves, torch's own too.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_note_capture(device: vmmgraph_device_t) -> vmmgraph_status_t {
    guard(|| {
        get::<Device, _>(device)?.note_capture();
        Ok(())
    })
}

/// Gives the device's free pages back to the driver, after waiting for what the device still uses of what is gone, and tries again what
/// the driver refused to take back earlier. `released` (may be null) receives the bytes of the pages.
///
/// # Safety
/// `released` is null or writable.
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
