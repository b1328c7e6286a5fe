//! State of the whole process: the log sink, and leaks of handles and descriptors. The tests run
//! one at a time.

mod life_cycle;
mod log;
