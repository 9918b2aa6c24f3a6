//! Buffers: memory that one process writes and one other process receives without a copy.

mod buffer_receiver;
mod send_buffer;

pub use buffer_receiver::{BufferReceiver, ReceivedBuffer};
pub use send_buffer::{BufferReference, SendBuffer};
