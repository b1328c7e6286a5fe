//! Structs that begin with their size. They only grow at the end, and 0 is what every field of an input means when it is not there;
//! so a caller's struct may be shorter or longer than this library's.

use std::borrow::Cow;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::{ptr, slice};

use super::guard::{Failure, check_items, not_null};
use super::status::VMMGRAPH_ERROR_STRUCT_SIZE;
use crate::error::Error;

/// The shortest struct: its size and something to say.
const SHORTEST: usize = 2 * WORD;
/// The longest struct that is believed; more is a size that nobody set.
const LONGEST: usize = 4096;
/// What the structs are aligned to, so that every sizeof is a multiple of it.
const WORD: usize = size_of::<usize>();

/// What C calls a limit: 0 is none.
pub(super) fn limit(most: u64) -> Option<u64> {
    (most > 0).then_some(most)
}

/// The `bytes` bytes from `offset` on. If the end does not fit in 64 bits the range ends at the highest
/// number, which is beyond the end of every object.
pub(super) fn range(offset: u64, bytes: u64) -> Range<u64> {
    offset..offset.saturating_add(bytes)
}

/// The struct_size at the beginning of a struct, if a struct can have it.
///
/// # Safety
/// The pointer is good to read a `usize` from.
unsafe fn size_at<T>(pointer: *const T) -> Result<usize, Failure> {
    // SAFETY: the caller's contract; nothing else is read before the size is known.
    let size = unsafe { *pointer.cast::<usize>() };
    if (SHORTEST..=LONGEST).contains(&size) && size.is_multiple_of(WORD) {
        return Ok(size);
    }
    Err(refused(size, "the sizeof of the struct: a multiple of 8 from 16 to 4096"))
}

fn refused(size: usize, expected: &'static str) -> Failure {
    let error = Error::InvalidArgument { what: "struct_size", value: size as i128, expected };
    Failure::Status(VMMGRAPH_ERROR_STRUCT_SIZE, error)
}

/// Reads the caller's struct of `size` bytes: 0 where it is shorter than a `T`. What it has more must be 0, since this library does
/// not know what it asks for.
///
/// # Safety
/// The pointer is good to read `size` bytes from; a `T` is a struct of numbers and pointers, of which all may be 0.
unsafe fn read<T: Copy>(from: *const T, size: usize) -> Result<T, Failure> {
    let known = size.min(size_of::<T>());
    // SAFETY: within the `size` bytes of the caller's contract.
    let unknown = unsafe { slice::from_raw_parts(from.cast::<u8>().add(known), size - known) };
    if unknown.iter().any(|byte| *byte != 0) {
        let what = "a struct that sets fields unknown to this library,";
        let error = Error::InvalidSize { what, bytes: size as u64, limit: size_of::<T>() as u64 };
        return Err(Failure::Status(VMMGRAPH_ERROR_STRUCT_SIZE, error));
    }
    // SAFETY: as above.
    Ok(unsafe { prefix(from, known) })
}

/// The first `known` bytes of a struct, and 0 behind them.
///
/// # Safety
/// As [`read`], and `known` is no more than a `T` has.
unsafe fn prefix<T: Copy>(from: *const T, known: usize) -> T {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: `known` bytes are readable by the caller's contract, and a `T` has as many. All its fields are set then, to the caller's
    // bytes or to 0, which numbers and pointers may be.
    unsafe {
        ptr::copy_nonoverlapping(from.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), known);
        value.assume_init()
    }
}

/// The options a pointer points to, or none for null.
///
/// # Safety
/// The pointer is null or points to a struct that begins with its size and has as many readable bytes; a `T` is as in [`read`].
pub(super) unsafe fn options<T: Copy>(pointer: *const T) -> Result<Option<T>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, so it points to a struct by the caller's contract.
    unsafe { read(pointer, size_at(pointer)?) }.map(Some)
}

/// The structs that the argument `what` points to: of any size, but all of the same. Copied if the size is not this library's.
///
/// # Safety
/// The pointer is null or points to `count` structs, each as [`options`] wants it, which stay as they are while the slice lives.
pub(super) unsafe fn sized_items<'a, T: Copy>(
    pointer: *const T,
    count: usize,
    what: &'static str,
) -> Result<Cow<'a, [T]>, Failure> {
    if count == 0 {
        return Ok(Cow::Borrowed(&[]));
    }
    check_items(pointer, count, size_of::<T>(), what)?;
    // SAFETY: not null, and there is a first one.
    let stride = unsafe { size_at(pointer) }?;
    check_items(pointer, count, stride, what)?;
    // SAFETY: the structs lie behind one another, each with as many bytes as the first says, by the caller's contract.
    let at = |index: usize| unsafe { pointer.byte_add(index * stride) };
    for index in 1..count {
        // SAFETY: the beginning of a struct, by the caller's contract.
        let size = unsafe { *at(index).cast::<usize>() };
        if size != stride {
            return Err(refused(size, "the same for all structs of an array"));
        }
    }
    if stride == size_of::<T>() {
        // SAFETY: not null, `count` of them by the caller's contract, and no more than a slice may have.
        return Ok(Cow::Borrowed(unsafe { slice::from_raw_parts(pointer, count) }));
    }
    // SAFETY: each has `stride` bytes by the caller's contract.
    (0..count).map(|index| unsafe { read(at(index), stride) }).collect::<Result<_, _>>().map(Cow::Owned)
}

/// A caller's struct that is to be filled. Never a reference to a `T`: the caller's may be shorter.
pub(super) struct OutStruct<T> {
    place: *mut T,
    /// As the caller set it.
    pub(super) struct_size: usize,
}

impl<T: Copy> OutStruct<T> {
    /// The struct that the argument `what` points to.
    ///
    /// # Safety
    /// The pointer is null or points to a struct that begins with its size, and has as many bytes to read and write while the result
    /// lives; a `T` is as in [`read`].
    pub(super) unsafe fn new(place: *mut T, what: &'static str) -> Result<Self, Failure> {
        not_null(place, what)?;
        // SAFETY: not null, so it points to a struct by the caller's contract.
        Ok(Self { place, struct_size: unsafe { size_at(place) }? })
    }

    fn known(&self) -> usize {
        self.struct_size.min(size_of::<T>())
    }

    /// What is in it; 0 where it is shorter than a `T`.
    pub(super) fn read(&self) -> T {
        // SAFETY: `new` was promised `struct_size` bytes, of which these are no more than a `T` has.
        unsafe { prefix(self.place, self.known()) }
    }

    /// Writes as much as it has room for. Its struct_size stays as it is, as does what it has more than a `T`.
    pub(super) fn write(&self, value: T) {
        let from = (&raw const value).cast::<u8>();
        // SAFETY: `new` was promised `struct_size` bytes, of which these are no more than a `T` has; every struct begins with its size,
        // a word.
        unsafe {
            ptr::copy_nonoverlapping(from.add(WORD), self.place.cast::<u8>().add(WORD), self.known() - WORD);
        }
    }
}
