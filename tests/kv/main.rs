//! Elastic buffers, KV caches, and arena pages on lease to both.

mod elastic;
mod kv_leases;
mod leases;
mod leases_model;
