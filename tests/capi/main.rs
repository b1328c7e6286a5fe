//! The C functions as called from C.

mod abi;
