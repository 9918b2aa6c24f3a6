//! DLPack's structures, of version 1, as far as they are needed here; `exchange` and `loans` call what they lead to.

use std::ffi::{CStr, c_int, c_void};

/// The attribute of a type of tensors that has the functions, and the name of the capsule that they are in.
pub(super) const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
pub(super) const CAPSULE: &CStr = c"dlpack_exchange_api";

/// A library with another version may have other structures.
pub(super) const MAJOR_VERSION: u32 = 1;

/// Host memory.
pub(super) const CPU: i32 = 1;

/// `DLPackVersion`.
#[repr(C)]
pub(super) struct Version {
    pub(super) major: u32,
    pub(super) minor: u32,
}

/// `DLDevice`.
#[repr(C)]
pub(super) struct Device {
    pub(super) kind: i32,
    pub(super) number: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Dtype {
    pub(super) code: u8,
    pub(super) bits: u8,
    pub(super) lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
pub(super) struct Tensor {
    pub(super) data: *mut c_void,
    pub(super) device: Device,
    pub(super) dimensions: i32,
    pub(super) dtype: Dtype,
    pub(super) shape: *const i64,
    pub(super) strides: *const i64,
    pub(super) byte_offset: u64,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub(super) struct Managed {
    pub(super) version: Version,
    pub(super) context: *mut c_void,
    pub(super) delete: Option<unsafe extern "C" fn(*mut Managed)>,
    pub(super) flags: u64,
    pub(super) tensor: Tensor,
}

/// Fills in a tensor that lasts as long as the object is not changed; not 0 where it raised.
pub(super) type Read = unsafe extern "C" fn(object: *mut c_void, out: *mut Tensor) -> c_int;

/// Makes an object of a tensor, which it takes over; not 0 where it raised.
pub(super) type Make = unsafe extern "C" fn(tensor: *mut Managed, out: *mut *mut c_void) -> c_int;

/// `DLPackExchangeAPI`. What is not called here is a pointer only.
#[repr(C)]
pub(super) struct Functions {
    pub(super) version: Version,
    _previous: *const c_void,
    _allocate: *const c_void,
    _export: *const c_void,
    pub(super) make: Option<Make>,
    pub(super) read: Option<Read>,
    _current_stream: *const c_void,
}
