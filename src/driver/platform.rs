//! Choice of the platform: by the caller, else the environment, else the first usable device, never
//! the host.

use super::abi::Abi;
use super::sharing::rdma_refused;
use super::{DeviceOptions, Handles, SharedDriver, ascend, cuda, hip, host, mlu, self_test_once};
use crate::error::{Error, Result};
use crate::units::Peers;

const VARIABLE: &str = "VMMGRAPH_DRIVER";

/// A kind of device, by name.
#[derive(Clone, Copy, Debug)]
pub struct Platform {
    /// Name in options, the environment and statistics.
    pub name: &'static str,
    /// Number in C: positive and permanent (`VMMGRAPH_DRIVER_...`).
    pub number: i32,
    /// Number of usable devices; an error names the missing part.
    pub count: fn() -> Result<i32>,
    /// Opens device `ordinal`; [`open`] checks the options.
    pub open: fn(ordinal: i32, options: DeviceOptions) -> Result<SharedDriver>,
    /// Declarations expected in the vendor's header.
    pub abi: fn() -> Abi,
}

/// All platforms, preferred first. The last needs no hardware.
pub const PLATFORMS: &[Platform] =
    &[cuda::PLATFORM, hip::PLATFORM, ascend::PLATFORM, mlu::PLATFORM, host::PLATFORM];

/// Platform of a C number.
#[must_use]
pub fn numbered(number: i32) -> Option<&'static Platform> {
    PLATFORMS.iter().find(|platform| platform.number == number)
}

/// C number of a platform; 0 for an unknown name.
#[must_use]
pub fn number_of(name: &str) -> i32 {
    PLATFORMS.iter().find(|platform| platform.name == name).map_or(0, |platform| platform.number)
}

pub(crate) fn names() -> String {
    PLATFORMS.iter().map(|platform| platform.name).collect::<Vec<_>>().join(", ")
}

/// Requested platform.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DriverChoice<'a> {
    /// From `VMMGRAPH_DRIVER`, if set; else the first platform with a usable device, never the
    /// host.
    #[default]
    Auto,
    /// By name.
    Named(&'a str),
}

impl DriverChoice<'static> {
    /// CUDA.
    pub const CUDA: Self = Self::Named(cuda::PLATFORM.name);
    /// HIP.
    pub const HIP: Self = Self::Named(hip::PLATFORM.name);
    /// Ascend.
    pub const ASCEND: Self = Self::Named(ascend::PLATFORM.name);
    /// MLU.
    pub const MLU: Self = Self::Named(mlu::PLATFORM.name);
    /// The host driver.
    pub const HOST: Self = Self::Named(host::PLATFORM.name);
}

/// Opens device `ordinal` with the chosen driver, and logs the choice.
///
/// # Errors
/// Errors of the platform and of [`self_test_once`]; [`Error::UnknownPlatform`];
/// [`Error::NoUsableDevice`] for [`DriverChoice::Auto`]; [`Error::InvalidArgument`] for unavailable
/// sharing, RDMA or a peer.
pub fn open(choice: DriverChoice, ordinal: i32, options: impl Into<DeviceOptions>) -> Result<SharedDriver> {
    let options = options.into();
    let (platform, because) = decide(PLATFORMS, choice, std::env::var(VARIABLE).ok().as_deref(), ordinal)?;
    let driver = match promised(options) {
        Some(shared) => match (platform.open)(ordinal, shared) {
            Ok(driver) if driver.sharing().is_some() => {
                tracing::info!(
                    device = ordinal,
                    "{NCCL_REGISTERS}=0 promises that NCCL registers no graph memory: pages are exportable"
                );
                driver
            }
            _ => (platform.open)(ordinal, options)?,
        },
        None => (platform.open)(ordinal, options)?,
    };
    if options.sharing != Handles::None && driver.sharing().is_none() {
        return Err(options.sharing.refused());
    }
    if options.rdma && !driver.rdma() {
        return Err(rdma_refused());
    }
    driver.capabilities().require_peers(options.peers.without(Peers::one(ordinal)))?;
    self_test_once(&driver)?;
    tracing::info!(
        driver = platform.name,
        device = ordinal,
        name = driver.info().name,
        because,
        "driver chosen"
    );
    Ok(driver)
}

const NCCL_REGISTERS: &str = "NCCL_GRAPH_REGISTER";

/// Pages are exportable by default only if NCCL does not register these in captures, as a seal
/// cannot replace registered pages.
fn promised(options: DeviceOptions) -> Option<DeviceOptions> {
    let promise = std::env::var(NCCL_REGISTERS).is_ok_and(|value| value == "0");
    (promise && options.sharing == Handles::None).then_some(DeviceOptions { sharing: Handles::Fd, ..options })
}

fn decide<'p>(
    platforms: &'p [Platform],
    choice: DriverChoice,
    variable: Option<&str>,
    ordinal: i32,
) -> Result<(&'p Platform, &'static str)> {
    let named = |name: &str| {
        let found = platforms.iter().find(|platform| platform.name == name);
        found.ok_or_else(|| Error::UnknownPlatform { name: name.to_owned() })
    };
    match (choice, variable.filter(|word| !word.is_empty())) {
        (DriverChoice::Named(name), _) => Ok((named(name)?, "asked for")),
        (DriverChoice::Auto, Some(name)) => Ok((named(name)?, "the environment names it")),
        (DriverChoice::Auto, None) => {
            let mut reasons = Vec::new();
            for platform in platforms.iter().filter(|platform| platform.name != host::PLATFORM.name) {
                match (platform.count)() {
                    Ok(1..) => return Ok((platform, "the first with a usable device")),
                    Ok(_) => reasons.push(format!("{}: the driver has no device", platform.name)),
                    Err(error) => reasons.push(format!("{}: {error}", platform.name)),
                }
            }
            Err(Error::NoUsableDevice { ordinal, reasons: reasons.join("; ") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &'static str, count: fn() -> Result<i32>) -> Platform {
        Platform { name, count, ..host::PLATFORM }
    }

    #[test]
    fn the_caller_goes_before_the_environment_and_that_before_the_hardware() {
        use DriverChoice::{Auto, Named};
        let with = |gpus| [named("cuda", gpus), named("hip", || Ok(1)), named("host", || Ok(1))];
        let name = |gpus, choice, variable| {
            decide(&with(gpus), choice, variable, 0).map(|(platform, _)| platform.name)
        };
        let none: fn() -> Result<i32> = || Ok(0);
        let two: fn() -> Result<i32> = || Ok(2);
        assert_eq!(name(none, Named("cuda"), Some("host")), Ok("cuda"));
        assert_eq!(name(two, Named("host"), Some("cuda")), Ok("host"));
        assert_eq!(name(none, Auto, Some("cuda")), Ok("cuda"));
        assert_eq!(name(two, Auto, Some("host")), Ok("host"));
        for unset in [None, Some("")] {
            assert_eq!(name(two, Auto, unset), Ok("cuda"));
            assert_eq!(name(none, Auto, unset), Ok("hip"));
            let missing = || Err(Error::DriverMissing { driver: "cuda", tried: String::new() });
            assert_eq!(name(missing, Auto, unset), Ok("hip"));
        }
        let unknown = Err(Error::UnknownPlatform { name: "gpu".to_owned() });
        assert_eq!(name(two, Auto, Some("gpu")), unknown);
        assert_eq!(name(two, Named("gpu"), None), unknown);
    }

    #[test]
    fn an_unknown_platform_lists_the_platforms() {
        let error = decide(PLATFORMS, DriverChoice::Named("gpu"), None, 0).map(drop).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot open a device of platform \"gpu\": this library has no such platform; use one of cuda, hip, \
             ascend, mlu, host, as the driver option or in VMMGRAPH_DRIVER"
        );
    }

    #[test]
    fn without_a_device_auto_names_every_reason_and_never_takes_the_host() {
        let missing = || Err(Error::DriverMissing { driver: "cuda", tried: "libcuda.so.1".to_owned() });
        let platforms = [named("cuda", missing), named("hip", || Ok(0)), named("host", || Ok(1))];
        let error = decide(&platforms, DriverChoice::Auto, None, 3).map(drop).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot open device 3: no platform has a usable device (cuda: the cuda driver's library is not there \
             (tried libcuda.so.1); hip: the driver has no device); set VMMGRAPH_DRIVER=host to use host memory instead"
        );
    }
}
