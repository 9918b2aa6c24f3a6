//! `Selection`: the rows of a shard that a handle names, a request asks for, and the fetch buffer has.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize, Serializer};

use crate::error::StoreError;
use crate::shard_id::ShardId;
use crate::tensor_meta::{Shape, TensorMeta};

/// Rows of a shard: positions in its first dimension. It takes eight bytes, because there may be millions of handles.
///
/// In JSON, `null` is all rows, and `[start, end]` a range of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(from = "Option<(u64, u64)>")]
pub enum Selection {
    /// All rows.
    All,
    /// The rows from `start` up to `end`.
    Range(Box<Range<u64>>),
}

impl Selection {
    /// The rows from `rows.start` up to `rows.end`.
    pub fn range(rows: Range<u64>) -> Self {
        Selection::Range(Box::new(rows))
    }

    /// Start and end of a range; `None` for all rows.
    pub fn bounds(&self) -> Option<(u64, u64)> {
        match self {
            Selection::All => None,
            Selection::Range(rows) => Some((rows.start, rows.end)),
        }
    }

    /// The first row.
    pub fn first(&self) -> u64 {
        self.bounds().map_or(0, |(start, _)| start)
    }

    /// The meta of these rows of a tensor `whole`.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where the tensor has no such rows.
    pub fn meta_of(&self, whole: &TensorMeta) -> Result<TensorMeta, StoreError> {
        let Some((start, end)) = self.bounds() else { return Ok(whole.clone()) };
        let mut shape = Shape::from_slice(whole.shape());
        let Some(count) = shape.first_mut() else {
            return Err(StoreError::Invalid("a tensor without dimensions has no rows to choose from".to_owned()));
        };
        if start > end || end > *count {
            return Err(StoreError::Invalid(format!("{self} do not lie within the {count} that there are")));
        }
        *count = end - start;
        TensorMeta::new(whole.dtype(), shape)
    }

    /// Whether all rows of `wanted` are among these.
    pub(crate) fn covers(&self, wanted: &Selection) -> bool {
        match (self, wanted) {
            (Selection::All, _) => true,
            (Selection::Range(_), Selection::All) => false,
            (Selection::Range(rows), Selection::Range(wanted)) => rows.start <= wanted.start && wanted.end <= rows.end,
        }
    }

    /// These rows, counted from the first of `outer`, which covers them.
    pub(crate) fn within(&self, outer: &Selection) -> Selection {
        match self {
            Selection::Range(rows) if self != outer => {
                let first = outer.first();
                Selection::range(rows.start.saturating_sub(first)..rows.end.saturating_sub(first))
            }
            _ => Selection::All,
        }
    }
}

impl From<Option<(u64, u64)>> for Selection {
    fn from(bounds: Option<(u64, u64)>) -> Self {
        bounds.map_or(Selection::All, |(start, end)| Selection::range(start..end))
    }
}

impl Serialize for Selection {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.bounds().serialize(serializer)
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selection::All => formatter.write_str("all rows"),
            Selection::Range(rows) => write!(formatter, "rows {} to {}", rows.start, rows.end),
        }
    }
}

/// A shard, or some of its rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ShardRows {
    /// The shard.
    pub id: ShardId,
    /// The rows.
    pub rows: Selection,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tensor_meta::Dtype;

    fn meta(name: &str, shape: &[u64]) -> TensorMeta {
        TensorMeta::new(Dtype::from_name(name).unwrap(), shape).unwrap()
    }

    fn selections() -> impl Strategy<Value = Selection> {
        proptest::option::of((0u64..20, 0u64..20)).prop_map(|bounds| bounds.map(|(a, b)| (a.min(b), a.max(b))).into())
    }

    #[test]
    fn a_selection_takes_8_bytes() {
        assert_eq!(size_of::<Selection>(), 8);
    }

    #[test]
    fn rows_are_selected_from_the_first_dimension() {
        let whole = meta("float32", &[10, 3, 2]);
        let selected = Selection::range(4..7).meta_of(&whole).unwrap();
        assert_eq!((selected.shape(), selected.nbytes()), (&[3, 3, 2][..], 72));
        assert_eq!(Selection::All.meta_of(&whole).unwrap(), whole);
        for dtype in Dtype::all() {
            let three = TensorMeta::new(dtype, [3u64].as_slice()).unwrap();
            assert_eq!(Selection::range(1..2).meta_of(&three).unwrap().dtype(), dtype);
        }
        assert_eq!(Selection::range(10..10).meta_of(&whole).unwrap().nbytes(), 0);
    }

    #[test]
    fn rows_that_a_tensor_does_not_have_are_refused() {
        let whole = meta("float32", &[10, 3]);
        for wrong in [(0, 11), (2, 1), (11, 11)] {
            let (start, end) = wrong;
            let error = Selection::from(Some(wrong)).meta_of(&whole).unwrap_err().to_string();
            assert!(error.contains(&format!("rows {start} to {end} do not lie within the 10")), "{error}");
        }
        let scalar = meta("int64", &[]);
        assert!(Selection::range(0..1).meta_of(&scalar).is_err());
        assert_eq!(Selection::All.meta_of(&scalar).unwrap(), scalar);
    }

    #[test]
    fn all_rows_are_null_in_json_and_a_range_is_a_pair() {
        let form = "[null,[3,7]]";
        let selections: Vec<Selection> = serde_json::from_str(form).unwrap();
        assert_eq!(selections, [Selection::All, Selection::range(3..7)]);
        assert_eq!(serde_json::to_string(&selections).unwrap(), form);
        for wrong in ["[1]", "[1,2,3]", "[-1,2]", "3", "{}"] {
            assert!(serde_json::from_str::<Selection>(wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn rows_of_a_selection_that_covers_them_are_the_rows_of_the_shard(had in selections(), wanted in selections()) {
            let rows: Vec<u64> = (0..20).collect();
            let select = |rows: &[u64], selection: &Selection| match selection.bounds() {
                Some((start, end)) => rows[start as usize..end as usize].to_vec(),
                None => rows.to_vec(),
            };
            // The length of a shard is not known: a range may be all of it, and is not taken for it.
            let covers = match (had.bounds(), wanted.bounds()) {
                (Some((start, end)), Some((first, last))) => start <= first && last <= end,
                (bounds, _) => bounds.is_none(),
            };
            prop_assert_eq!(had.covers(&wanted), covers);
            if covers {
                prop_assert_eq!(select(&select(&rows, &had), &wanted.within(&had)), select(&rows, &wanted));
            }
        }
    }
}
