//! Drivers of HIP, MLU and Ascend over stand-ins which enforce the vendors' rules.

mod standin;

/// Calls a function of the module's `STAND_IN`.
macro_rules! call {
    ($name:ident($($argument:expr => $kind:ty),*) -> $result:ty) => {{
        let function: unsafe extern "C" fn($($kind),*) -> $result = STAND_IN.function(stringify!($name));
        // SAFETY: signatures of the stand-in's crate; pointers are good.
        unsafe { function($($argument),*) }
    }};
}

mod ascend;
mod hip;
mod mlu;
