//! A vendor's C interface as data: the very declarations that the driver calls by, so that they can be held against the vendor's header.
//!
//! The macros `c_types`, `c_structs`, `c_constants` and (in `library`) `c_functions` declare Rust types and, from the same words, what they are called in C.
//! So a signature cannot be right in one and wrong in the other. CUDA's types are cudarc's and are not listed.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// What a platform's driver assumes of its vendor's header.
#[derive(Clone, Debug, Default)]
pub struct Abi {
    /// The platform's name.
    pub platform: &'static str,
    /// The lines of C that make the vendor's declarations visible.
    pub preamble: &'static str,
    /// Every function that is looked up.
    pub functions: Vec<Function>,
    /// Every structure that crosses the border.
    pub structs: Vec<Layout>,
    /// Every number that has a name in the header.
    pub constants: Vec<Constant>,
}

/// A function of a vendor's library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// The symbol.
    pub name: &'static str,
    /// What it returns, in C.
    pub result: String,
    /// What it takes, in C.
    pub arguments: Vec<String>,
    /// The driver can do without it, so older headers may lack it.
    pub optional: bool,
}

impl Function {
    /// The type of a pointer to it, in C.
    #[must_use]
    pub fn pointer(&self) -> String {
        let arguments = if self.arguments.is_empty() { "void".to_owned() } else { self.arguments.join(", ") };
        format!("{} (*)({arguments})", self.result)
    }
}

/// A structure of a vendor's header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Its type, in C.
    pub name: &'static str,
    /// Its size in bytes.
    pub bytes: usize,
    /// Its members by their names in C, each with its offset in bytes.
    pub members: Vec<(&'static str, usize)>,
}

/// A number with a name in a vendor's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constant {
    /// Its name in C.
    pub name: &'static str,
    /// Its value.
    pub value: i64,
}

/// A type that has a name in C.
pub(super) trait CType {
    /// That name.
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

/// Integers and handles that have a name of their own in C: `/// doc` `Name(Rust type) = "C name";`
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

/// Structures, held to the size and the offsets that the header has: `Name = "C name", bytes { member: Type = "C name" @ offset, }`
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

        /// The structures, for who compares them with the header.
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

/// Numbers of the header: `NAME: Type = value, "C name";`
macro_rules! c_constants {
    ($list:ident: $($(#[$doc:meta])* $name:ident: $kind:ty = $value:literal, $c:literal;)*) => {
        $($(#[$doc])* pub(super) const $name: $kind = $value;)*

        /// The numbers, for who compares them with the header.
        pub(super) fn $list() -> Vec<$crate::driver::abi::Constant> {
            vec![$($crate::driver::abi::Constant { name: $c, value: i64::from($name) }),*]
        }
    };
}
pub(super) use c_constants;
