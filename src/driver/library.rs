//! Loads a vendor's library for good, and looks up all functions before the first call. cudarc
//! loads CUDA only, and panics on a missing symbol.

use std::ffi::{CStr, OsStr, OsString};
use std::mem::ManuallyDrop;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::abi::CType;
use crate::error::{Error, Result};

/// Finds only libraries already loaded.
const RTLD_NOLOAD: i32 = 4;

#[derive(Clone, Copy, Debug)]
pub(super) struct Vendor {
    pub(super) driver: &'static str,
    /// Environment variable naming a file.
    pub(super) variable: &'static str,
    /// Preferred first, but a loaded name wins: a second copy would not know its streams.
    pub(super) names: &'static [&'static str],
    /// Refused name prefixes, with the reason.
    pub(super) refused: &'static [(&'static str, &'static str)],
}

#[derive(Debug)]
pub(super) struct Loaded {
    driver: &'static str,
    /// Never closed.
    library: ManuallyDrop<Library>,
}

impl Vendor {
    /// Loads the file of the environment variable, else the first available name.
    ///
    /// # Errors
    /// [`Error::DriverMissing`] with the names tried; [`Error::UnfitDriver`] for a refused name.
    pub(super) fn find(&self) -> Result<Loaded> {
        self.find_as(std::env::var_os(self.variable).filter(|word| !word.is_empty()))
    }

    fn find_as(&self, asked: Option<OsString>) -> Result<Loaded> {
        if let Some(file) = asked {
            self.refuse(&file)?;
            return self.load(&file, 0).ok_or_else(|| Error::DriverMissing {
                driver: self.driver,
                tried: format!("{} by {}", file.to_string_lossy(), self.variable),
            });
        }
        for (name, why) in self.refused {
            if self.load(OsStr::new(name), RTLD_NOLOAD).is_some() {
                return Err(self.unfit(name, why));
            }
        }
        let names = || self.names.iter().map(OsStr::new);
        let loaded = names().find_map(|name| self.load(name, RTLD_NOLOAD));
        let found = loaded.or_else(|| names().find_map(|name| self.load(name, 0)));
        found.ok_or_else(|| Error::DriverMissing { driver: self.driver, tried: self.names.join(", ") })
    }

    /// Compares the file's name, and the name of its link target.
    fn refuse(&self, file: &OsStr) -> Result<()> {
        let real = std::fs::canonicalize(file).ok();
        for path in [Some(file.as_ref()), real.as_deref()].into_iter().flatten() {
            let Some(name) = path.file_name().and_then(OsStr::to_str) else { continue };
            if let Some((_, why)) = self.refused.iter().find(|(refused, _)| name.starts_with(refused)) {
                return Err(self.unfit(name, why));
            }
        }
        Ok(())
    }

    fn unfit(&self, name: &str, why: &str) -> Error {
        Error::UnfitDriver { driver: self.driver, problem: format!("{name} is refused: {why}") }
    }

    fn load(&self, name: &OsStr, flags: i32) -> Option<Loaded> {
        // SAFETY: runs the library's initialisers.
        let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL | flags) }.ok()?;
        Some(Loaded { driver: self.driver, library: ManuallyDrop::new(library) })
    }
}

impl Loaded {
    /// Fails with [`Error::SymbolMissing`].
    ///
    /// # Safety
    /// The symbol, if present, is a function with this signature.
    pub(super) unsafe fn required<F: Signature>(&self, name: &'static CStr) -> Result<F> {
        // SAFETY: the caller's contract.
        let missing = || Error::SymbolMissing { driver: self.driver, name: name.to_str().unwrap_or("") };
        // SAFETY: the caller's contract.
        unsafe { self.optional(name) }.ok_or_else(missing)
    }

    /// # Safety
    /// As [`required`](Self::required).
    pub(super) unsafe fn optional<F: Signature>(&self, name: &'static CStr) -> Option<F> {
        // SAFETY: the caller's contract; the library is never unloaded.
        unsafe { self.library.get::<F>(name.to_bytes_with_nul()) }.ok().map(|symbol| *symbol)
    }
}

pub(super) trait Signature: Copy {
    fn result() -> String;
    fn arguments() -> Vec<String>;
}

macro_rules! signatures {
    ($($($argument:ident)*;)*) => {
        $(impl<R: CType, $($argument: CType),*> Signature for unsafe extern "C" fn($($argument),*) -> R {
            fn result() -> String {
                R::c()
            }
            fn arguments() -> Vec<String> {
                vec![$($argument::c()),*]
            }
        })*
    };
}

signatures! {
    ;
    A;
    A B;
    A B C;
    A B C D;
    A B C D E;
    A B C D E F;
}

/// Table of a vendor's functions, looked up at the first call, also as data: `Api of VENDOR {
/// required { name(Type, Type) -> Type; } optional { .. } }`. Optional functions are an `Option`.
macro_rules! c_functions {
    ($(#[$doc:meta])* $api:ident of $vendor:ident {
        required { $($name:ident($($arg:ty),*) -> $result:ty;)* }
        optional { $($extra:ident($($extra_arg:ty),*) -> $extra_result:ty;)* }
    }) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "the vendor's own names")]
        #[derive(Debug)]
        pub(super) struct $api {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> $result,)*
            $(pub(super) $extra: Option<unsafe extern "C" fn($($extra_arg),*) -> $extra_result>,)*
        }

        impl $api {
            pub(super) fn get() -> $crate::error::Result<&'static Self> {
                static API: std::sync::OnceLock<$crate::error::Result<$api>> = std::sync::OnceLock::new();
                API.get_or_init(|| Self::of($vendor.find()?)).as_ref().map_err(Clone::clone)
            }

            fn of(library: $crate::driver::library::Loaded) -> $crate::error::Result<Self> {
                Ok(Self {
                    $($name: {
                        const NAME: &std::ffi::CStr = $crate::driver::library::symbol(concat!(stringify!($name), "\0"));
                        // SAFETY: tests compare the signature with the header.
                        unsafe { library.required(NAME) }?
                    },)*
                    $($extra: {
                        const NAME: &std::ffi::CStr = $crate::driver::library::symbol(concat!(stringify!($extra), "\0"));
                        // SAFETY: as above.
                        unsafe { library.optional(NAME) }
                    },)*
                })
            }

            pub(super) fn functions() -> Vec<$crate::driver::abi::Function> {
                use $crate::driver::library::described;
                vec![
                    $(described::<unsafe extern "C" fn($($arg),*) -> $result>(stringify!($name), false),)*
                    $(described::<unsafe extern "C" fn($($extra_arg),*) -> $extra_result>(stringify!($extra), true),)*
                ]
            }
        }
    };
}
pub(super) use c_functions;

pub(super) const fn symbol(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

pub(super) fn described<F: Signature>(name: &'static str, optional: bool) -> super::abi::Function {
    super::abi::Function { name, result: F::result(), arguments: F::arguments(), optional }
}

#[cfg(test)]
mod tests {
    use std::ffi::{c_char, c_int, c_void};

    use super::*;
    use crate::driver::abi::c_types;

    const C_LIBRARY: Vendor = Vendor {
        driver: "test",
        variable: "VMMGRAPH_TEST_LIBRARY",
        names: &["libvmmgraph-none.so.9", "libc.so.6"],
        refused: &[("libvmmgraph-old.so.5", "it is old")],
    };

    c_types! {
        Word(c_int) = "word_t";
    }

    c_functions! {
        Api of C_LIBRARY {
            required {
                strlen(*const c_char) -> usize;
                memcpy(*mut c_void, *const c_void, usize) -> *mut c_void;
            }
            optional {
                vmmgraph_is_not_there(Word, *mut *mut c_void) -> Word;
                getpid() -> c_int;
            }
        }
    }

    c_functions! {
        #[allow(dead_code, reason = "it is never called")]
        Lacking of C_LIBRARY {
            required { vmmgraph_is_not_there() -> Word; }
            optional { }
        }
    }

    #[test]
    fn names_are_tried_in_order_and_optional_functions_may_be_missing() {
        let api = Api::get().unwrap();
        let mut copy = [0_u8; 4];
        // SAFETY: on a string and a buffer of its size.
        let length = unsafe {
            (api.memcpy)(copy.as_mut_ptr().cast(), c"four".as_ptr().cast(), 4);
            (api.strlen)(c"four".as_ptr())
        };
        assert_eq!((&copy, length), (b"four", 4));
        assert!(api.vmmgraph_is_not_there.is_none() && api.getpid.is_some());
        let missing = Lacking::get().map(drop);
        assert_eq!(missing, Err(Error::SymbolMissing { driver: "test", name: "vmmgraph_is_not_there" }));
    }

    #[test]
    fn the_table_says_in_c_what_it_calls_by() {
        let pointers: Vec<String> = Api::functions().iter().map(|f| f.pointer()).collect();
        assert_eq!(
            pointers,
            [
                "size_t (*)(const char *)",
                "void * (*)(void *, const void *, size_t)",
                "word_t (*)(word_t, void * *)",
                "int (*)(void)"
            ]
        );
        assert!(Api::functions().iter().map(|f| f.optional).eq([false, false, true, true]));
        assert_eq!(Lacking::functions()[0].pointer(), "word_t (*)(void)");
    }

    #[test]
    fn a_library_that_is_missing_or_never_taken_is_an_error_in_words() {
        let none = Vendor { names: &["libvmmgraph-none.so.9", "libvmmgraph-none.so.8"], ..C_LIBRARY };
        let missing = none.find_as(None).map(drop).unwrap_err().to_string();
        assert!(missing.contains("libvmmgraph-none.so.9, libvmmgraph-none.so.8"), "{missing}");
        let asked = none.find_as(Some("/nowhere/lib.so".into())).map(drop).unwrap_err().to_string();
        assert!(asked.contains("/nowhere/lib.so") && asked.contains("VMMGRAPH_TEST_LIBRARY"), "{asked}");

        let folder = std::env::temp_dir().join(format!("vmmgraph-library-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (old, link) = (folder.join("libvmmgraph-old.so.5.2"), folder.join("new.so"));
        std::fs::write(&old, "").unwrap();
        std::os::unix::fs::symlink(&old, &link).unwrap();
        for file in [&old, &link] {
            let refused = none.find_as(Some(file.into())).map(drop).unwrap_err();
            assert!(matches!(refused, Error::UnfitDriver { driver: "test", .. }), "{refused}");
            assert!(refused.to_string().contains("it is old"), "{refused}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
        // Even if loaded.
        let loaded = Vendor { refused: &[("libc.so.6", "it is there")], ..C_LIBRARY };
        assert!(matches!(loaded.find_as(None), Err(Error::UnfitDriver { .. })));
    }
}
