//! Controls for tests: `standin_*`, found with
//! `cudarc::driver::sys::culib().get(b"standin_...\0")`.

standin::controls!(crate::faults::FAULTS);
