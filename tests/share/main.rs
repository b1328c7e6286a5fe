//! Memory shared with peer devices and other processes.

mod exports;
mod peers;
mod processes;
mod remote;
