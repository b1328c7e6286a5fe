//! File descriptors of exported pages, sent between processes.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::error::{Error, Result};

/// Descriptors in one message (`SCM_MAX_FD` of Linux).
pub const MOST_DESCRIPTORS: usize = 253;

fn failed(call: &'static str, error: Errno) -> Error {
    Error::Driver { call, code: error.raw_os_error(), name: error.to_string() }
}

/// Sends descriptors and bytes over a connected Unix socket: `vmmgraph_send_descriptors`. System
/// errors are [`Error::Driver`] with their number.
pub fn send_descriptors(
    socket: BorrowedFd<'_>,
    descriptors: &[BorrowedFd<'_>],
    bytes: &[u8],
) -> Result<usize> {
    let refuse =
        |what, value: usize, expected| Err(Error::InvalidArgument { what, value: value as i128, expected });
    if descriptors.len() > MOST_DESCRIPTORS {
        return refuse("descriptors of a message", descriptors.len(), "at most 253");
    }
    if bytes.is_empty() {
        return refuse("bytes of a message", 0, "at least one, or nothing is sent");
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent.map_err(|error| failed("sendmsg", error)),
        }
    }
}

/// Receives a message of [`send_descriptors`]: `vmmgraph_receive_descriptors`. With `EMFILE`, some
/// descriptors could not be opened, and the received ones are closed.
pub fn receive_descriptors(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>)> {
    if bytes.is_empty() {
        let expected = "at least one, or nothing is received";
        return Err(Error::InvalidArgument { what: "room for bytes of a message", value: 0, expected });
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received.map_err(|error| failed("recvmsg", error))?,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(failed("recvmsg", Errno::MFILE));
    }
    Ok((received.bytes, descriptors))
}
