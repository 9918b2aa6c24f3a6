//! The structures of DLPack, version 1, that `dlpack_exchange` and `tensor_builder` use.

use std::ffi::{CStr, c_int, c_void};

/// The attribute of a tensor type that holds the exchange API, and the name of its capsule.
pub(crate) const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
pub(crate) const CAPSULE: &CStr = c"dlpack_exchange_api";

/// A library with another version may have other structures.
pub(crate) const MAJOR_VERSION: u32 = 1;

// `DLDataTypeCode`.
pub(crate) const INT: u8 = 0;
pub(crate) const UINT: u8 = 1;
pub(crate) const COMPLEX: u8 = 5;

/// Host memory, and memory of a CUDA device.
pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;

/// `DLPackVersion`.
#[repr(C)]
pub(crate) struct Version {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// `DLDevice`.
#[repr(C)]
pub(crate) struct Device {
    pub(crate) kind: i32,
    pub(crate) number: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dtype {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
pub(crate) struct Tensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: Device,
    pub(crate) dimensions: i32,
    pub(crate) dtype: Dtype,
    pub(crate) shape: *const i64,
    pub(crate) strides: *const i64,
    pub(crate) byte_offset: u64,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub(crate) struct Managed {
    pub(crate) version: Version,
    pub(crate) context: *mut c_void,
    pub(crate) delete: Option<unsafe extern "C" fn(*mut Managed)>,
    pub(crate) flags: u64,
    pub(crate) tensor: Tensor,
}

/// Fills in a tensor that is valid until the object changes; returns 0 unless it raised.
pub(crate) type Read = unsafe extern "C" fn(object: *mut c_void, out: *mut Tensor) -> c_int;

/// Makes an object of a tensor, which it takes over; returns 0 unless it raised.
pub(crate) type Make = unsafe extern "C" fn(tensor: *mut Managed, out: *mut *mut c_void) -> c_int;

/// `DLPackExchangeAPI`. Functions that are not called here are plain pointers.
#[repr(C)]
pub(crate) struct Functions {
    pub(crate) version: Version,
    _previous: *const c_void,
    _allocate: *const c_void,
    _export: *const c_void,
    pub(crate) make: Option<Make>,
    pub(crate) read: Option<Read>,
    _current_stream: *const c_void,
}
