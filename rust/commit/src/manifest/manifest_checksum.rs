//! The checksum that a manifest contains of itself.
//!
//! It is the last field of the JSON object and covers every byte before it. The bytes after it are fixed. So a change
//! of any bit of the file is found.

use crate::checksum::Checksum;

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
mod tests {
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
