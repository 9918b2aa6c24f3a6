//! Shards as JSON for other clients: `{"type": "tensor", "dtype", "shape", "data"}`, the bytes in base64.
//!
//! It is the form of AReaL's clients, and as there the elements of a bfloat16 tensor travel as float32, which has all
//! their values. Base64 is made piece by piece, so that no shard is ever whole in it. No list that is read names more
//! than [`MAX_IDS`] shards.

use std::fmt;
use std::marker::PhantomData;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::route::Refusal;
use crate::Step;
use crate::selection::{Selection, ShardRows};
use crate::shard_id::ShardId;
use crate::stats::{Claimed, Removed, StorageStats};
use crate::tensor_meta::TensorMeta;

/// Bytes of a shard that are turned into base64 at once: three make four characters, with nothing left over.
pub(super) const STRIDE: usize = 48 << 10;

/// Shards that one list names, in a body of less than ten megabytes.
pub(super) const MAX_IDS: usize = 1 << 16;

const PREFIX: &str = "torch.";
const BFLOAT16: &str = "bfloat16";

/// How the bytes of a shard are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Base64 {
    /// Two bytes of bfloat16 become four of float32.
    widens: bool,
}

impl Base64 {
    pub(super) fn of(meta: &TensorMeta) -> Self {
        Base64 { widens: meta.dtype().name() == BFLOAT16 }
    }

    /// Characters for so many bytes.
    pub(super) fn len(self, bytes: u64) -> u64 {
        let written = if self.widens { bytes * 2 } else { bytes };
        written.div_ceil(3) * 4
    }

    /// Appends `bytes`, up to [`STRIDE`] of them, to `target`.
    pub(super) fn write(self, bytes: &[u8], target: &mut String) {
        if self.widens {
            let wide: Vec<u8> = bytes.chunks_exact(2).flat_map(|half| [0, 0, half[0], half[1]]).collect();
            STANDARD.encode_string(wide, target);
        } else {
            STANDARD.encode_string(bytes, target);
        }
    }
}

/// The text before the base64 of a shard.
pub(super) fn text_before_data(meta: &TensorMeta) -> String {
    let shape: Vec<_> = meta.shape().iter().map(u64::to_string).collect();
    let (name, shape) = (meta.dtype().name(), shape.join(","));
    format!(r#"{{"type":"tensor","dtype":"{PREFIX}{name}","shape":[{shape}],"data":""#)
}

/// The text after it.
pub(super) const TEXT_AFTER_DATA: &str = r#""}"#;

#[derive(Deserialize)]
struct BatchRequest {
    shard_ids: List<ShardId>,
    #[serde(default)]
    rows: Option<List<Selection>>,
}

/// The shards that a body names, and the rows of them.
///
/// # Errors
/// A [`Refusal`] where it names none.
pub fn read_batch(body: &[u8]) -> Result<Vec<ShardRows>, Refusal> {
    let BatchRequest { shard_ids: List(names), rows } =
        serde_json::from_slice(body).map_err(|error| no_list(&error))?;
    let rows = rows.map_or_else(|| vec![Selection::All; names.len()], |List(rows)| rows);
    if rows.len() != names.len() {
        return Err(Refusal::new(400, "'rows' has one entry for each of 'shard_ids': [start, stop], or null for all"));
    }
    Ok(names.into_iter().zip(rows).map(|(id, rows)| ShardRows { id, rows }).collect())
}

/// The shards that a body names; `None` for `null`.
///
/// # Errors
/// A [`Refusal`] for any other body.
pub fn read_ids(body: &[u8]) -> Result<Option<Vec<ShardId>>, Refusal> {
    #[derive(Deserialize)]
    struct Ids {
        // Without this a list that is missing would be as one that is null.
        #[serde(deserialize_with = "Option::deserialize")]
        shard_ids: Option<List<ShardId>>,
    }
    let ids: Ids = serde_json::from_slice(body).map_err(|error| no_list(&error))?;
    Ok(ids.shard_ids.map(|List(names)| names))
}

/// A list of at most [`MAX_IDS`] items; a longer one is an error.
struct List<T>(Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Items<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Items<T> {
            type Value = List<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<List<T>, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = items.next_element()? {
                    if list.len() == MAX_IDS {
                        return Err(A::Error::custom(format!("a request names at most {MAX_IDS} of them")));
                    }
                    list.push(item);
                }
                Ok(List(list))
            }
        }

        deserializer.deserialize_seq(Items(PhantomData))
    }
}

fn no_list(error: &serde_json::Error) -> Refusal {
    Refusal::new(400, format!("Expected JSON body with string list field 'shard_ids': {error}"))
}

/// A body that names shards and rows of them.
pub(super) fn batch_body(wanted: &[ShardRows]) -> Vec<u8> {
    #[derive(Serialize)]
    struct BatchRequest<'a> {
        shard_ids: Vec<&'a ShardId>,
        #[serde(skip_serializing_if = "Option::is_none")]
        rows: Option<Vec<&'a Selection>>,
    }
    let rows = wanted.iter().map(|one| &one.rows);
    let rows = rows.clone().any(|rows| *rows != Selection::All).then(|| rows.collect());
    let batch = BatchRequest { shard_ids: wanted.iter().map(|one| &one.id).collect(), rows };
    serde_json::to_vec(&batch).expect("names have a form in JSON")
}

/// The answer without content.
#[derive(Serialize)]
pub(super) struct OkAnswer {
    status: &'static str,
}

impl OkAnswer {
    pub(super) fn new() -> Self {
        OkAnswer { status: "ok" }
    }
}

/// The answer to shards that are removed: how many, their bytes, and how many tensors and bytes are left.
#[derive(Serialize)]
pub(super) struct RemovedAnswer {
    status: &'static str,
    cleared_count: u64,
    num_tensors: u64,
    total_bytes: u64,
    freed_bytes: u64,
}

impl RemovedAnswer {
    pub(super) fn new(removed: Removed, left: &StorageStats) -> Self {
        RemovedAnswer {
            status: "ok",
            cleared_count: removed.cleared_count,
            freed_bytes: removed.total_bytes,
            num_tensors: left.num_entries,
            total_bytes: left.total_bytes,
        }
    }
}

/// The answer to a fetch buffer that is cleared: how many entries.
#[derive(Serialize)]
pub(super) struct ClearedAnswer {
    status: &'static str,
    cleared_count: u64,
}

impl ClearedAnswer {
    pub(super) fn new(cleared_count: u64) -> Self {
        ClearedAnswer { status: "ok", cleared_count }
    }
}

/// An answer that refuses.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct ErrorAnswer {
    #[serde(default)]
    pub(super) status: String,
    #[serde(default)]
    pub(super) message: String,
    /// The shards of a batch that are not there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) missing_shard_ids: Vec<String>,
    /// Those of them that were there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) removed_shard_ids: Vec<String>,
    /// The step that has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) ended_step: Option<Step>,
    /// The step that is another's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) taken_step: Option<Step>,
}

/// The answer to a claim.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ClaimAnswer {
    pub(super) claimed_count: u64,
    pub(super) total_bytes: u64,
    pub(super) missing_shard_ids: Vec<ShardId>,
    pub(super) taken_shard_ids: Vec<ShardId>,
    /// Claimed shards that somebody kept before.
    pub(super) kept_shard_ids: Vec<ShardId>,
}

impl From<Claimed> for ClaimAnswer {
    fn from(claimed: Claimed) -> Self {
        ClaimAnswer {
            claimed_count: claimed.claimed_count,
            total_bytes: claimed.total_bytes,
            missing_shard_ids: claimed.missing,
            taken_shard_ids: claimed.taken,
            kept_shard_ids: claimed.kept,
        }
    }
}

/// The answer to a request to keep: fetched entries, and claimed shards.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct KeepAnswer {
    pub(super) kept_count: u64,
    pub(super) kept_shards: u64,
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::tensor_meta::Dtype;

    fn meta(name: &str, shape: &[u64]) -> TensorMeta {
        TensorMeta::new(Dtype::from_name(name).unwrap(), shape).unwrap()
    }

    fn written(meta: &TensorMeta, bytes: &[u8]) -> String {
        let (form, mut text) = (Base64::of(meta), String::new());
        bytes.chunks(STRIDE).for_each(|chunk| form.write(chunk, &mut text));
        assert_eq!(text.len() as u64, form.len(bytes.len() as u64));
        format!("{}{text}{TEXT_AFTER_DATA}", text_before_data(meta))
    }

    #[test]
    fn json_of_a_tensor_equals_that_of_areal() {
        // serialize_value(torch.tensor([1.0, -2.0])) and of the same in bfloat16, as of AReaL 1.0.4.
        let ones = written(&meta("float32", &[2]), &[0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0]);
        assert_eq!(ones, r#"{"type":"tensor","dtype":"torch.float32","shape":[2],"data":"AACAPwAAAMA="}"#);
        let halves = written(&meta("bfloat16", &[2]), &[0x80, 0x3f, 0, 0xc0]);
        assert_eq!(halves, r#"{"type":"tensor","dtype":"torch.bfloat16","shape":[2],"data":"AACAPwAAAMA="}"#);
    }

    #[test]
    fn lists_of_ids_are_lists_of_strings() {
        for body in ["", "{}", "[]", r#"{"shard_ids": "a"}"#, r#"{"shard_ids": [1]}"#, r#"{"shard_ids": ["a/b"]}"#] {
            assert_eq!(read_ids(body.as_bytes()).unwrap_err().status, 400, "{body}");
            assert_eq!(read_batch(body.as_bytes()).unwrap_err().status, 400, "{body}");
        }
        assert_eq!(read_ids(br#"{"shard_ids": null}"#).unwrap(), None);
        assert_eq!(read_ids(br#"{"shard_ids": []}"#).unwrap(), Some(vec![]));
        assert_eq!(read_batch(br#"{"shard_ids": null}"#).unwrap_err().status, 400);
        assert_eq!(read_batch(br#"{"shard_ids": ["a"], "rows": []}"#).unwrap_err().status, 400);
        assert_eq!(read_batch(br#"{"shard_ids": ["a"], "rows": [[1]]}"#).unwrap_err().status, 400);
        assert_eq!(read_ids(br#"{"shard_ids": ["\u0061"]}"#).unwrap(), Some(vec!["a".parse().unwrap()]));
    }

    #[test]
    fn lists_have_an_end() {
        let list = |names: usize| format!(r#"{{"shard_ids": [{}]}}"#, vec![r#""a""#; names].join(","));
        assert_eq!(read_batch(list(MAX_IDS).as_bytes()).unwrap().len(), MAX_IDS);
        for refused in [read_batch(list(MAX_IDS + 1).as_bytes()).err(), read_ids(list(MAX_IDS + 1).as_bytes()).err()] {
            let refusal = refused.expect("too many");
            assert!(refusal.status == 400 && refusal.reason.contains("at most 65536"), "{refusal:?}");
        }
    }

    proptest! {
        #[test]
        fn base64_is_that_of_all_bytes(dtype: usize, rows in 0u64..70_000) {
            let dtypes: Vec<_> = Dtype::all().collect();
            let meta = TensorMeta::new(dtypes[dtype % dtypes.len()], &[rows][..]).unwrap();
            let bytes: Vec<u8> = (0..meta.nbytes()).map(|place| ((place * place) >> 3) as u8).collect();
            let wide: Vec<u8> = if meta.dtype().name() == BFLOAT16 {
                bytes.chunks_exact(2).flat_map(|half| [0, 0, half[0], half[1]]).collect()
            } else {
                bytes.clone()
            };
            prop_assert_eq!(written(&meta, &bytes), format!("{}{}{TEXT_AFTER_DATA}", text_before_data(&meta), STANDARD.encode(wide)));
        }

        #[test]
        fn a_batch_is_read_as_it_was_written(batch in vec(("[a-z:._-]{1,9}", any::<Option<(u64, u64)>>()), 0..9)) {
            let batch = batch.into_iter().map(|(id, rows)| ShardRows { id: id.parse().unwrap(), rows: rows.into() });
            let batch: Vec<_> = batch.collect();
            prop_assert_eq!(read_batch(&batch_body(&batch)).unwrap(), batch.clone());
            let whole: Vec<_> = batch.into_iter().map(|one| ShardRows { rows: Selection::All, ..one }).collect();
            let ids = whole.iter().map(|selection| selection.id.clone()).collect();
            prop_assert_eq!(read_ids(&batch_body(&whole)).unwrap(), Some(ids));
        }

        #[test]
        fn any_bytes_are_read_or_refused(body in vec(any::<u8>(), 0..100)) {
            let _ = (read_batch(&body), read_ids(&body));
        }
    }
}
