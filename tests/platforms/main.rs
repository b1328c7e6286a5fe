//! Drivers of HIP, MLU and Ascend over stand-ins which enforce the vendors' rules.

mod ascend;
mod hip;
mod mlu;
