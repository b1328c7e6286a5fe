//! Which driver to take: the caller's word, else the environment's, else a GPU if there is one, else the host.

use std::sync::Arc;

use super::{CudaDriver, DriverKind, HostDriver, HostOptions, SharedDriver};
use crate::error::{Error, Result};

/// The environment variable that chooses when the caller leaves it open.
const VARIABLE: &str = "VMMGRAPH_DRIVER";

/// What the caller wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DriverChoice {
    /// `VMMGRAPH_DRIVER` (`cuda` or `host`) if it is set; else CUDA where a usable device is; else the host.
    #[default]
    Auto,
    /// CUDA, or an error that says what is missing.
    Cuda,
    /// The host driver.
    Host,
}

/// Opens device `ordinal` with the chosen driver and logs the choice.
///
/// # Errors
/// Those of [`CudaDriver::new`] and [`HostDriver::new`]; [`Error::InvalidArgument`] if the variable holds another word.
pub fn open(choice: DriverChoice, ordinal: i32, host: HostOptions) -> Result<SharedDriver> {
    let (kind, because) = decide(choice, std::env::var(VARIABLE).ok().as_deref(), CudaDriver::count)?;
    let driver: SharedDriver = match kind {
        DriverKind::Cuda => Arc::new(CudaDriver::new(ordinal)?),
        DriverKind::Host => Arc::new(HostDriver::new(ordinal, host)?),
    };
    tracing::info!(driver = %kind, device = ordinal, name = driver.info().name, because, "driver chosen");
    Ok(driver)
}

/// The choice itself, and why.
fn decide(
    choice: DriverChoice,
    variable: Option<&str>,
    gpus: impl FnOnce() -> Result<i32>,
) -> Result<(DriverKind, &'static str)> {
    match (choice, variable) {
        (DriverChoice::Cuda, _) => Ok((DriverKind::Cuda, "asked for")),
        (DriverChoice::Host, _) => Ok((DriverKind::Host, "asked for")),
        (DriverChoice::Auto, Some("cuda")) => Ok((DriverKind::Cuda, "VMMGRAPH_DRIVER=cuda")),
        (DriverChoice::Auto, Some("host")) => Ok((DriverKind::Host, "VMMGRAPH_DRIVER=host")),
        (DriverChoice::Auto, Some(word)) if !word.is_empty() => Err(Error::InvalidArgument {
            what: "VMMGRAPH_DRIVER (length of its text)",
            value: word.len() as i128,
            expected: "cuda, host, or unset",
        }),
        (DriverChoice::Auto, _) => Ok(match gpus() {
            Ok(1..) => (DriverKind::Cuda, "a GPU is there"),
            Ok(_) => (DriverKind::Host, "no GPU is there"),
            Err(_) => (DriverKind::Host, "no usable CUDA driver is there"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caller_goes_before_the_environment_and_that_before_the_hardware() {
        use DriverChoice::{Auto, Cuda, Host};
        let kind =
            |choice, variable, gpus: Result<i32>| decide(choice, variable, || gpus).map(|(kind, _)| kind);
        assert_eq!(kind(Cuda, Some("host"), Ok(0)), Ok(DriverKind::Cuda));
        assert_eq!(kind(Host, Some("cuda"), Ok(1)), Ok(DriverKind::Host));
        assert_eq!(kind(Auto, Some("cuda"), Ok(0)), Ok(DriverKind::Cuda));
        assert_eq!(kind(Auto, Some("host"), Ok(1)), Ok(DriverKind::Host));
        for unset in [None, Some("")] {
            assert_eq!(kind(Auto, unset, Ok(2)), Ok(DriverKind::Cuda));
            assert_eq!(kind(Auto, unset, Ok(0)), Ok(DriverKind::Host));
            assert_eq!(kind(Auto, unset, Err(Error::DriverMissing)), Ok(DriverKind::Host));
        }
        assert!(matches!(kind(Auto, Some("gpu"), Ok(1)), Err(Error::InvalidArgument { value: 3, .. })));
    }
}
