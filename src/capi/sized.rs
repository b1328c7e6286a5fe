//! Structs which begin with their size. Structs only grow at the end, and 0 is the default of every
//! input field, so a caller's struct may be shorter or longer.

use std::borrow::Cow;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::{ptr, slice};

use super::guard::{Failure, check_items, not_null};
use super::status::VMMGRAPH_ERROR_STRUCT_SIZE;
use crate::error::Error;

/// struct_size and one field.
const SHORTEST: usize = 2 * WORD;
/// A larger struct_size was never set.
const LONGEST: usize = 4096;
/// Every sizeof is a multiple.
const WORD: usize = size_of::<usize>();

/// 0 means none.
pub(super) fn limit(most: u64) -> Option<u64> {
    (most > 0).then_some(most)
}

/// An overflowing range ends at `u64::MAX`, beyond the end of every object.
pub(super) fn range(offset: u64, bytes: u64) -> Range<u64> {
    offset..offset.saturating_add(bytes)
}

/// # Safety
/// Readable as a `usize`.
unsafe fn size_at<T>(pointer: *const T) -> Result<usize, Failure> {
    // SAFETY: the caller's contract; only the size is read.
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

/// Missing fields are 0. Bytes beyond `T` must be 0, since this library does not know their
/// meaning.
///
/// # Safety
/// `size` bytes are readable. `T` is a struct of numbers and pointers, for which 0 is valid.
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

/// The remaining bytes are 0.
///
/// # Safety
/// As [`read`]; `known` is at most the size of `T`.
unsafe fn prefix<T: Copy>(from: *const T, known: usize) -> T {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: `known` bytes are readable and fit in `T`; other fields are 0, which is valid.
    unsafe {
        ptr::copy_nonoverlapping(from.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), known);
        value.assume_init()
    }
}

/// None for null.
///
/// # Safety
/// Null, or a struct of as many readable bytes as its first field says; `T` as in [`read`].
pub(super) unsafe fn options<T: Copy>(pointer: *const T) -> Result<Option<T>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, so a struct by the caller's contract.
    unsafe { read(pointer, size_at(pointer)?) }.map(Some)
}

/// All elements must have the same struct_size. Borrows the array if it equals the size of `T`,
/// else copies.
///
/// # Safety
/// Null, or `count` structs as for [`options`], unchanged while the slice lives.
pub(super) unsafe fn sized_items<'a, T: Copy>(
    pointer: *const T,
    count: usize,
    what: &'static str,
) -> Result<Cow<'a, [T]>, Failure> {
    if count == 0 {
        return Ok(Cow::Borrowed(&[]));
    }
    check_items(pointer, count, size_of::<T>(), what)?;
    // SAFETY: not null, and `count` is at least 1.
    let stride = unsafe { size_at(pointer) }?;
    check_items(pointer, count, stride, what)?;
    // SAFETY: contiguous structs with a stride of the first one's size (contract).
    let at = |index: usize| unsafe { pointer.byte_add(index * stride) };
    for index in 1..count {
        // SAFETY: start of a struct, by the caller's contract.
        let size = unsafe { *at(index).cast::<usize>() };
        if size != stride {
            return Err(refused(size, "the same for all structs of an array"));
        }
    }
    if stride == size_of::<T>() {
        // SAFETY: not null, `count` elements (contract), within the size limit of a slice.
        return Ok(Cow::Borrowed(unsafe { slice::from_raw_parts(pointer, count) }));
    }
    // SAFETY: each has `stride` bytes by the caller's contract.
    (0..count).map(|index| unsafe { read(at(index), stride) }).collect::<Result<_, _>>().map(Cow::Owned)
}

/// Never a reference to a `T`: the caller's struct may be shorter.
pub(super) struct OutStruct<T> {
    place: *mut T,
    pub(super) struct_size: usize,
}

impl<T: Copy> OutStruct<T> {
    /// # Safety
    /// As [`options`], readable and writable while the result lives.
    pub(super) unsafe fn new(place: *mut T, what: &'static str) -> Result<Self, Failure> {
        not_null(place, what)?;
        // SAFETY: not null, so a struct by the caller's contract.
        Ok(Self { place, struct_size: unsafe { size_at(place) }? })
    }

    /// # Safety
    /// As [`new`](Self::new).
    pub(super) unsafe fn optional(place: *mut T, what: &'static str) -> Result<Option<Self>, Failure> {
        // SAFETY: contract.
        if place.is_null() { Ok(None) } else { unsafe { Self::new(place, what) }.map(Some) }
    }

    fn known(&self) -> usize {
        self.struct_size.min(size_of::<T>())
    }

    /// Missing fields are 0.
    pub(super) fn read(&self) -> T {
        // SAFETY: `new` required `struct_size` bytes; `known` exceeds neither these nor `T`.
        unsafe { prefix(self.place, self.known()) }
    }

    /// Writes the fields for which the struct has room, except struct_size.
    pub(super) fn write(&self, value: T) {
        let from = (&raw const value).cast::<u8>();
        // SAFETY: as in `read`; every struct begins with its size, one word.
        unsafe {
            ptr::copy_nonoverlapping(from.add(WORD), self.place.cast::<u8>().add(WORD), self.known() - WORD);
        }
    }
}
