//! `tundish.json`, the manifest of a checkpoint.
//!
//! It lies in the checkpoint's folder, is written after all other files, and never changes. Format version 1 is a JSON
//! object:
//!
//! ```json
//! {"format_version": 1, "kind": "hf", "step": 100, "tag": null, "world_size": 8, "extra": {},
//!  "files": [{"name": "model.safetensors", "size": 4096, "checksum": "crc64nvme:0123456789abcdef"}]}
//! ```
//!
//! `tag`, `world_size`, `extra` and a file's `checksum` may be missing or null. Other fields are ignored. Names that
//! lead outside the folder are refused.

use std::collections::BTreeSet;
use std::fmt;

use crate::checksum::Checksum;
use std::path::{Component, Path};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// The name of the manifest in a checkpoint's folder.
pub const FILE_NAME: &str = "tundish.json";
const FORMAT_VERSION: u64 = 1;

/// The kind of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckpointKind {
    /// Distributed checkpoints of torch.
    Dcp,
    /// Hugging Face exports.
    Hf,
}

impl CheckpointKind {
    /// Both kinds.
    pub const ALL: [CheckpointKind; 2] = [CheckpointKind::Dcp, CheckpointKind::Hf];
}

impl fmt::Display for CheckpointKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            CheckpointKind::Dcp => "dcp",
            CheckpointKind::Hf => "hf",
        })
    }
}

/// The name of a kind that does not exist.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no kind of checkpoint called {0:?}: it is \"hf\" or \"dcp\"")]
pub struct UnknownKind(String);

impl FromStr for CheckpointKind {
    type Err = UnknownKind;

    fn from_str(text: &str) -> Result<Self, UnknownKind> {
        CheckpointKind::ALL
            .into_iter()
            .find(|kind| kind.to_string() == text)
            .ok_or_else(|| UnknownKind(text.to_owned()))
    }
}

/// A parsed manifest.
#[derive(Debug, Clone, Deserialize)]
pub struct Manifest {
    /// The kind of the checkpoint.
    pub kind: CheckpointKind,
    /// The training step it was taken at.
    pub step: u64,
    /// The `tag` of its save.
    pub tag: Option<String>,
    /// The number of ranks that wrote it.
    pub world_size: Option<u64>,
    /// The `extra` of its save, as JSON that this library does not interpret.
    pub extra: Option<Box<RawValue>>,
    /// All files but the manifest.
    pub files: Vec<ManifestEntry>,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, Deserialize)]
pub struct ManifestEntry {
    /// Its name relative to the checkpoint's folder, with `/` between folders.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Such as `crc64nvme:0123456789abcdef`.
    pub checksum: Option<String>,
}

#[derive(Deserialize)]
struct Version {
    format_version: u64,
}

impl Manifest {
    /// Parses a manifest; the error says what is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Manifest, String> {
        let unreadable = |error: serde_json::Error| format!("it cannot be understood: {error}");
        let Version { format_version } = serde_json::from_slice(bytes).map_err(unreadable)?;
        if format_version != FORMAT_VERSION {
            return Err(format!(
                "its format version is {format_version}, and this library reads version {FORMAT_VERSION}"
            ));
        }
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(unreadable)?;
        check_names(manifest.files.iter().map(|file| file.name.as_str()))?;
        Ok(manifest)
    }

    /// Bytes of all files but the manifest.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.size))
    }
}

/// Refuses names that lead outside the folder, duplicates, and names that are both a file's and a folder's.
pub(crate) fn check_names<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let mut files = BTreeSet::new();
    let mut folders = BTreeSet::new();
    for name in names {
        let plain = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
            && !name.split('/').any(|part| part.is_empty() || part == ".")
            && !name.contains('\0');
        if !plain || name == FILE_NAME {
            return Err(format!("it lists {name:?}, which is no name for a file of a checkpoint"));
        }
        if !files.insert(name) {
            return Err(format!("it lists {name:?} twice"));
        }
        folders.extend(name.match_indices('/').map(|(end, _)| &name[..end]));
    }
    match files.intersection(&folders).next() {
        Some(name) => Err(format!("it lists {name:?} both as a file and as a folder")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(files: &str) -> Result<Manifest, String> {
        let text = format!(r#"{{"format_version": 1, "kind": "hf", "step": 7, "files": [{files}], "more": 1}}"#);
        Manifest::parse(text.as_bytes())
    }

    #[test]
    fn a_manifest_is_read() {
        let text = br#"{"format_version": 1, "kind": "dcp", "step": 18446744073709551615, "tag": "snapshot",
            "world_size": 2, "extra": {"a": 1e400, "b": 123456789012345678901234567890},
            "files": [{"name": "a/b/c", "size": 3, "checksum": "crc64nvme:0"}, {"name": "a/b.c", "size": 4}]}"#;
        let manifest = Manifest::parse(text).unwrap();
        assert_eq!((manifest.kind, manifest.step), (CheckpointKind::Dcp, u64::MAX));
        assert_eq!(manifest.tag.as_deref(), Some("snapshot"));
        assert_eq!(manifest.bytes(), 7);
        // Numbers that only Python knows are handed on as they are.
        assert_eq!(manifest.extra.unwrap().get(), r#"{"a": 1e400, "b": 123456789012345678901234567890}"#);
    }

    #[test]
    fn names_that_could_lead_outside_or_collide_are_refused() {
        for bad in ["", "/a", "../a", "a/../b", "a/./b", "./a", "a//b", "a/", "..", ".", "tundish.json", "a\\u0000b"] {
            let error = manifest(&format!(r#"{{"name": "{bad}", "size": 1}}"#)).unwrap_err();
            assert!(error.contains("no name for a file"), "{bad}: {error}");
        }
        let both = |one: &str, other: &str| {
            manifest(&format!(r#"{{"name": "{one}", "size": 1}}, {{"name": "{other}", "size": 1}}"#))
        };
        assert!(both("a", "a").unwrap_err().contains("twice"));
        assert!(both("a/b", "a").unwrap_err().contains("as a folder"));
        assert!(both("a/b", "a/b/c").unwrap_err().contains("as a folder"));
        assert!(both("a-b", "a/b").is_ok());
        assert!(both("..a", "b..").is_ok());
    }

    #[test]
    fn invalid_manifests_and_other_versions_are_refused() {
        for bad in [
            "",
            "{}",
            "[]",
            "\u{0}\u{0}",
            r#"{"format_version": 1}"#,
            r#"{"format_version": 1, "kind": "hf", "step": -1, "files": []}"#,
            r#"{"format_version": 1, "kind": "hf", "step": 1.5, "files": []}"#,
            r#"{"format_version": 1, "kind": "other", "step": 1, "files": []}"#,
            r#"{"format_version": 1, "kind": "hf", "step": 1, "files": [{"name": "a"}]}"#,
            r#"{"format_version": 1, "kind": "hf", "step": 1, "files": []"#,
        ] {
            assert!(Manifest::parse(bad.as_bytes()).unwrap_err().starts_with("it cannot be understood"), "{bad}");
        }
        let newer = br#"{"format_version": 2, "anything": "else"}"#;
        assert!(Manifest::parse(newer).unwrap_err().contains("version is 2"));
    }

    #[test]
    fn kinds_are_known_by_their_names() {
        assert_eq!("hf".parse(), Ok(CheckpointKind::Hf));
        assert_eq!("dcp".parse(), Ok(CheckpointKind::Dcp));
        for other in ["", "HF", "hf ", "zip"] {
            assert!(other.parse::<CheckpointKind>().is_err());
        }
    }
}

// The checksum that a manifest contains of itself.
//
// It is the last field of the JSON object and covers every byte before it. The bytes after it are fixed. So a change
// of any bit of the file is found.

const BEFORE: &str = ",\n  \"checksum\": \"";
const AFTER: &str = "\"\n}\n";

/// Adds the checksum to the text of a JSON object with at least one field; `None` for anything else.
pub fn add_manifest_checksum(text: &str) -> Option<String> {
    let body = text.trim_end().strip_suffix('}')?.trim_end();
    let checksum = Checksum::of(body.as_bytes());
    Some(format!("{body}{BEFORE}{checksum}{AFTER}"))
}

/// Whether `bytes` are a manifest that [`add_manifest_checksum`] wrote.
pub(crate) fn has_valid_checksum(bytes: &[u8]) -> bool {
    let parts = || {
        let (body, rest) = std::str::from_utf8(bytes).ok()?.rsplit_once(BEFORE)?;
        Some((body, rest.strip_suffix(AFTER)?.parse::<Checksum>().ok()?))
    };
    parts().is_some_and(|(body, checksum)| checksum == Checksum::of(body.as_bytes()))
}

#[cfg(test)]
mod manifest_checksum_tests {
    use super::*;

    #[test]
    fn the_checksum_leaves_the_json_otherwise_unchanged() {
        for text in ["{\"a\": [1, {}]}", "{\n  \"a\": [1, {}]\n}\n", "{\"a\":[1,{}]} "] {
            let summed = add_manifest_checksum(text).unwrap();
            assert!(has_valid_checksum(summed.as_bytes()));
            let mut fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&summed).unwrap();
            assert!(fields.remove("checksum").unwrap().as_str().unwrap().starts_with("crc64nvme:"));
            assert_eq!(serde_json::Value::Object(fields), serde_json::json!({"a": [1, {}]}));
        }
        assert_eq!(add_manifest_checksum("[1]"), None);
        assert_eq!(add_manifest_checksum(""), None);
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_found() {
        let summed = add_manifest_checksum("{\"a\": \"\u{e4}\", \"b\": 12}").unwrap().into_bytes();
        for bit in 0..8 * summed.len() {
            let mut changed = summed.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(!has_valid_checksum(&changed), "bit {bit}");
        }
        for length in 0..summed.len() {
            assert!(!has_valid_checksum(&summed[..length]), "cut to {length}");
        }
        assert!(!has_valid_checksum(&[&summed[..], b"\n"].concat()));
    }
}

// [`FileMetadata`]: name, size and checksum of one file.

/// A durable file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileMetadata {
    /// Its name relative to the checkpoint's folder, with `/` between folders.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// `None` where none was requested.
    pub checksum: Option<Checksum>,
}
