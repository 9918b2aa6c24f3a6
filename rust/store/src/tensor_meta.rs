//! `TensorMeta`: the element type and the shape of a tensor.

use std::fmt;

use smallvec::SmallVec;

use crate::error::StoreError;

/// Dimensions; without an allocation up to four.
pub type Shape = SmallVec<[u64; 4]>;

/// The most dimensions that a tensor of torch has.
const MAX_DIMENSIONS: usize = 64;

/// The type of a tensor's elements, by the code that torch's `c10::ScalarType` has for it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dtype(u8);

/// Code, name as torch has it, bytes. Quantized types are left out: their tensors are more than bytes.
const DTYPES: [(u8, &str, u64); 42] = [
    (0, "uint8", 1),
    (1, "int8", 1),
    (2, "int16", 2),
    (3, "int32", 4),
    (4, "int64", 8),
    (5, "float16", 2),
    (6, "float32", 4),
    (7, "float64", 8),
    (8, "complex32", 4),
    (9, "complex64", 8),
    (10, "complex128", 16),
    (11, "bool", 1),
    (15, "bfloat16", 2),
    (18, "bits1x8", 1),
    (19, "bits2x4", 1),
    (20, "bits4x2", 1),
    (21, "bits8", 1),
    (22, "bits16", 2),
    (23, "float8_e5m2", 1),
    (24, "float8_e4m3fn", 1),
    (25, "float8_e5m2fnuz", 1),
    (26, "float8_e4m3fnuz", 1),
    (27, "uint16", 2),
    (28, "uint32", 4),
    (29, "uint64", 8),
    (30, "uint1", 1),
    (31, "uint2", 1),
    (32, "uint3", 1),
    (33, "uint4", 1),
    (34, "uint5", 1),
    (35, "uint6", 1),
    (36, "uint7", 1),
    (37, "int1", 1),
    (38, "int2", 1),
    (39, "int3", 1),
    (40, "int4", 1),
    (41, "int5", 1),
    (42, "int6", 1),
    (43, "int7", 1),
    (44, "float8_e8m0fnu", 1),
    (45, "float4_e2m1fn_x2", 1),
    (46, "bcomplex32", 4),
];

impl Dtype {
    /// The type with this code.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where there is none that can be stored.
    pub fn from_code(code: u8) -> Result<Self, StoreError> {
        let found = DTYPES.iter().any(|(known, ..)| *known == code);
        found.then_some(Dtype(code)).ok_or_else(|| StoreError::Invalid(format!("no element type has the code {code}")))
    }

    /// The type with this name, which is torch's without `torch.`.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where there is none that can be stored.
    pub fn from_name(name: &str) -> Result<Self, StoreError> {
        let found = DTYPES.iter().find(|(_, known, _)| *known == name);
        found.map(|(code, ..)| Dtype(*code)).ok_or_else(|| {
            StoreError::Invalid(format!("tensors of the type {name:?} cannot be stored; convert it first"))
        })
    }

    /// All of them.
    pub fn all() -> impl Iterator<Item = Dtype> {
        DTYPES.iter().map(|(code, ..)| Dtype(*code))
    }

    /// The number of the dtype in torch.
    pub fn code(self) -> u8 {
        self.0
    }

    /// The name of the dtype in torch.
    pub fn name(self) -> &'static str {
        self.entry().1
    }

    /// Bytes of an element.
    pub fn size(self) -> u64 {
        self.entry().2
    }

    fn entry(self) -> &'static (u8, &'static str, u64) {
        let place = DTYPES.binary_search_by_key(&self.0, |(code, ..)| *code);
        &DTYPES[place.expect("every code was looked up when it was made")]
    }
}

impl fmt::Debug for Dtype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Element type and shape of a tensor whose bytes lie one after the other, rows first.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct TensorMeta {
    dtype: Dtype,
    shape: Shape,
    nbytes: u64,
}

impl TensorMeta {
    /// The meta of a tensor of this type and shape.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for more than 64 dimensions, and for more bytes than an address can name.
    pub fn new(dtype: Dtype, shape: impl Into<Shape>) -> Result<Self, StoreError> {
        let shape = shape.into();
        if shape.len() > MAX_DIMENSIONS {
            let many = shape.len();
            return Err(StoreError::Invalid(format!("a tensor has at most {MAX_DIMENSIONS} dimensions, not {many}")));
        }
        // Zeros are left out of the product, because strides are computed without them.
        let product = shape.iter().try_fold(dtype.size(), |product, &size| product.checked_mul(size.max(1)));
        let Some(product) = product.filter(|&product| isize::try_from(product).is_ok()) else {
            return Err(StoreError::Invalid(format!("a tensor of the shape {shape:?} is larger than any memory")));
        };
        let nbytes = if shape.contains(&0) { 0 } else { product };
        Ok(TensorMeta { dtype, shape, nbytes })
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The dimensions.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Bytes of the whole.
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Bytes of a row; `None` of a tensor without dimensions.
    pub fn row_bytes(&self) -> Option<u64> {
        let (_, inner) = self.shape.split_first()?;
        Some(inner.iter().product::<u64>() * self.dtype.size())
    }
}

impl fmt::Debug for TensorMeta {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}{:?}", self.dtype, &self.shape[..])
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    fn meta(name: &str, shape: &[u64]) -> TensorMeta {
        TensorMeta::new(Dtype::from_name(name).unwrap(), shape).unwrap()
    }

    #[test]
    fn every_type_is_found_by_its_code_and_by_its_name() {
        for dtype in Dtype::all() {
            assert_eq!(Dtype::from_code(dtype.code()).unwrap(), dtype);
            assert_eq!(Dtype::from_name(dtype.name()).unwrap(), dtype);
        }
        assert_eq!(Dtype::from_name("bfloat16").unwrap().code(), 15);
        // Quantized ones.
        for code in [12, 13, 14, 16, 17, 47, 255] {
            assert!(Dtype::from_code(code).is_err());
        }
    }

    #[test]
    fn scalars_and_empty_tensors_have_the_bytes_that_torch_gives_them() {
        assert_eq!((meta("int64", &[]).nbytes(), meta("int64", &[]).row_bytes()), (8, None));
        assert_eq!(meta("int64", &[0, 5]).nbytes(), 0);
        assert_eq!(meta("int64", &[5, 0]).row_bytes(), Some(0));
        assert_eq!(meta("float32", &[10, 3, 2]).row_bytes(), Some(24));
    }

    #[test]
    fn shapes_larger_than_any_memory_are_refused() {
        let dtype = Dtype::from_name("float64").unwrap();
        let too_large: [Shape; 3] = [smallvec![1 << 61], smallvec![0, 1 << 62, 4], Shape::from_elem(1, 65)];
        for shape in too_large {
            assert!(matches!(TensorMeta::new(dtype, shape), Err(StoreError::Invalid(_))));
        }
    }
}
