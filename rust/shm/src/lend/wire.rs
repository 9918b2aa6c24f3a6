//! What is said between who lends a segment and who asks for it.
//!
//! Requests and replies are of fixed size, in the byte order of the one machine that both run on. A descriptor
//! travels with the reply that says so (SCM_RIGHTS, unix(7)); bytes follow theirs.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::retry_on_intr;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use rustix::process::geteuid;

use crate::segment::Address;

/// Begins every request: another version says something else.
const GREETING: u64 = u64::from_ne_bytes(*b"tdlend 1");

const REQUEST: usize = 5 * 8;
const REPLY: usize = 2 * 8;

/// In which form a segment is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Descriptor,
    Bytes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) form: Form,
    pub(super) address: Address,
}

impl Request {
    pub(super) fn send(self, mut stream: &UnixStream) -> io::Result<()> {
        let form = match self.form {
            Form::Descriptor => 1,
            Form::Bytes => 2,
        };
        let Address { process, descriptor, identity, generation } = self.address;
        // Of one word's room, both of them.
        let place = u64::from(process) << 32 | u64::from(descriptor.cast_unsigned());
        stream.write_all(&joined::<REQUEST>(&[GREETING, form, place, identity, generation]))
    }

    /// The next request; `None` when the other side has hung up.
    pub(super) fn receive(mut stream: &UnixStream) -> io::Result<Option<Self>> {
        let mut bytes = [0; REQUEST];
        match stream.read(&mut bytes[..1])? {
            0 => return Ok(None),
            read => stream.read_exact(&mut bytes[read..])?,
        }
        let [greeting, form, place, identity, generation] = split(&bytes);
        let form = match (greeting, form) {
            (GREETING, 1) => Form::Descriptor,
            (GREETING, 2) => Form::Bytes,
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "not a request of this version")),
        };
        let (process, descriptor) = ((place >> 32) as u32, (place as u32).cast_signed());
        Ok(Some(Self { form, address: Address { process, descriptor, identity, generation } }))
    }
}

/// The answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reply {
    /// Here it is: so many bytes, header included.
    Here(u64),
    /// The segment was given back.
    Gone,
    /// It is there, but no descriptor of it could be made.
    Failed,
}

impl Reply {
    fn to_bytes(self) -> [u8; REPLY] {
        joined(&match self {
            Reply::Here(length) => [0, length],
            Reply::Gone => [1, 0],
            Reply::Failed => [2, 0],
        })
    }

    fn from_bytes(bytes: &[u8; REPLY]) -> io::Result<Self> {
        match split(bytes) {
            [0, length] => Ok(Reply::Here(length)),
            [1, _] => Ok(Reply::Gone),
            [2, _] => Ok(Reply::Failed),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not a reply of this version")),
        }
    }

    pub(super) fn send(self, mut stream: &UnixStream) -> io::Result<()> {
        stream.write_all(&self.to_bytes())
    }

    pub(super) fn send_with(self, stream: &UnixStream, descriptor: &OwnedFd) -> io::Result<()> {
        let bytes = self.to_bytes();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor.as_fd()];
        if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::Error::other("no room for a descriptor"));
        }
        let sent = retry_on_intr(|| sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL))?;
        // The descriptor went with the first byte.
        (&*stream).write_all(&bytes[sent..])
    }

    pub(super) fn receive(mut stream: &UnixStream) -> io::Result<Self> {
        let mut bytes = [0; REPLY];
        stream.read_exact(&mut bytes)?;
        Self::from_bytes(&bytes)
    }

    /// A reply and the descriptor that came with it: none where this process could not take it, for it may have no
    /// more of them, or a rule of the machine may forbid it.
    pub(super) fn receive_with(mut stream: &UnixStream) -> io::Result<(Self, Option<OwnedFd>)> {
        let mut bytes = [0; REPLY];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retry_on_intr(|| {
            recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let descriptor = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        let descriptor = descriptor.filter(|_| !received.flags.contains(ReturnFlags::CTRUNC));
        stream.read_exact(&mut bytes[received.bytes..])?;
        Ok((Self::from_bytes(&bytes)?, descriptor))
    }
}

/// Whether the other side acts for the same user, as the kernel noted when the connection was made.
pub(super) fn is_own(stream: &UnixStream) -> io::Result<bool> {
    Ok(socket_peercred(stream)?.uid == geteuid())
}

fn joined<const N: usize>(words: &[u64]) -> [u8; N] {
    let mut bytes = [0; N];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

fn split<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    for (word, place) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        let mut eight = [0; 8];
        eight.copy_from_slice(place);
        *word = u64::from_ne_bytes(eight);
    }
    words
}
