//! Arenas and their spaces: capture, seal, replay, eager work, driver calls, on the host driver and
//! the stand-in libcuda.so.

mod across_graphs;
mod budgets;
mod call_costs;
mod devices;
mod driver_calls;
mod eager;
mod exclusive;
mod executables;
mod lifetime_profile;
mod limits;
mod order;
mod packing;
mod pending_unmap;
mod preserve;
mod recapture;
mod reclaimers;
mod regressions;
mod replaced;
mod shrink;
mod spaces;
mod stress;
mod trace;
mod training_graphs;
mod waits_in_capture;
mod workspaces;
