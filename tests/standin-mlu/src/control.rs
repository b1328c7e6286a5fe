//! Controls for tests: `standin_*`, looked up in the loaded library.

standin::controls!(crate::faults::FAULTS);
