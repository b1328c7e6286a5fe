//! C interface of a vendor's library as data, compared with the vendor's header by tests. Macros
//! generate the Rust declarations and the C names from one source. CUDA's types come from cudarc.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// Declarations expected in a vendor's header.
#[derive(Clone, Debug, Default)]
pub struct Abi {
    /// Name of the platform.
    pub platform: &'static str,
    /// C lines which include the header.
    pub preamble: &'static str,
    /// All functions looked up.
    pub functions: Vec<Function>,
    /// All structures passed.
    pub structs: Vec<Layout>,
    /// All named constants.
    pub constants: Vec<Constant>,
}

/// A function of a vendor's library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Symbol.
    pub name: &'static str,
    /// Return type in C.
    pub result: String,
    /// Argument types in C.
    pub arguments: Vec<String>,
    /// Older headers may lack the function.
    pub optional: bool,
}

impl Function {
    /// C type of a pointer to the function.
    #[must_use]
    pub fn pointer(&self) -> String {
        let arguments = if self.arguments.is_empty() { "void".to_owned() } else { self.arguments.join(", ") };
        format!("{} (*)({arguments})", self.result)
    }
}

/// A structure of a vendor's header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Type in C.
    pub name: &'static str,
    /// Size in bytes.
    pub bytes: usize,
    /// Members by C name, with offsets in bytes.
    pub members: Vec<(&'static str, usize)>,
}

/// A named constant of a vendor's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constant {
    /// Name in C.
    pub name: &'static str,
    /// Value.
    pub value: i64,
}

pub(super) trait CType {
    fn c() -> String;
}

macro_rules! plain {
    ($($rust:ty = $c:literal;)*) => {
        $(impl CType for $rust {
            fn c() -> String {
                $c.to_owned()
            }
        })*
    };
}

plain! {
    c_void = "void";
    c_char = "char";
    c_int = "int";
    c_uint = "unsigned int";
    u64 = "uint64_t";
    usize = "size_t";
}

impl<T: CType> CType for *mut T {
    fn c() -> String {
        format!("{} *", T::c())
    }
}

impl<T: CType> CType for *const T {
    fn c() -> String {
        format!("const {} *", T::c())
    }
}

/// Integers and handles with their own C type: `/// doc` `Name(Rust type) = "C name";`
macro_rules! c_types {
    ($($(#[$doc:meta])* $name:ident($inner:ty) = $c:literal;)*) => {
        $(
            $(#[$doc])*
            #[repr(transparent)]
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub(super) struct $name(pub(super) $inner);

            impl $crate::driver::abi::CType for $name {
                fn c() -> String {
                    $c.to_owned()
                }
            }
        )*
    };
}
pub(super) use c_types;

/// Structures with the size and offsets of the header, checked at compile time:
/// `Name = "C name", bytes { member: Type = "C name" @ offset, }`
macro_rules! c_structs {
    ($list:ident: $($(#[$doc:meta])* $name:ident = $c:literal, $bytes:literal {
        $($(#[$member_doc:meta])* $member:ident: $kind:ty = $c_member:literal @ $offset:literal,)*
    })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug)]
            pub(super) struct $name { $($(#[$member_doc])* pub(super) $member: $kind,)* }

            const _: () = {
                assert!(size_of::<$name>() == $bytes);
                $(assert!(std::mem::offset_of!($name, $member) == $offset);)*
            };

            impl $crate::driver::abi::CType for $name {
                fn c() -> String {
                    $c.to_owned()
                }
            }
        )*

        pub(super) fn $list() -> Vec<$crate::driver::abi::Layout> {
            vec![$($crate::driver::abi::Layout {
                name: $c,
                bytes: $bytes,
                members: vec![$(($c_member, $offset)),*],
            }),*]
        }
    };
}
pub(super) use c_structs;

/// Constants of the header: `NAME: Type = value, "C name";`
macro_rules! c_constants {
    ($list:ident: $($(#[$doc:meta])* $name:ident: $kind:ty = $value:literal, $c:literal;)*) => {
        $($(#[$doc])* pub(super) const $name: $kind = $value;)*

        pub(super) fn $list() -> Vec<$crate::driver::abi::Constant> {
            vec![$($crate::driver::abi::Constant { name: $c, value: i64::from($name) }),*]
        }
    };
}
pub(super) use c_constants;
