//! The checksum that a manifest carries of itself.
//!
//! It is the last field of the JSON object and covers every byte before it; what follows those bytes is compared as it
//! stands. So a change of any bit of the file is found.

use crate::checksum::Checksum;

const BEFORE: &str = ",\n  \"checksum\": \"";
const AFTER: &str = "\"\n}\n";

/// Adds the checksum to the text of a JSON object that has fields; `None` for what cannot be one.
pub fn seal(text: &str) -> Option<String> {
    let body = text.trim_end().strip_suffix('}')?.trim_end();
    let checksum = Checksum::of(body.as_bytes());
    Some(format!("{body}{BEFORE}{checksum}{AFTER}"))
}

/// Whether `bytes` are as [`seal`] left them.
pub(crate) fn is_intact(bytes: &[u8]) -> bool {
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
    fn a_sealed_text_is_json_that_says_the_same() {
        for text in ["{\"a\": [1, {}]}", "{\n  \"a\": [1, {}]\n}\n", "{\"a\":[1,{}]} "] {
            let sealed = seal(text).unwrap();
            assert!(is_intact(sealed.as_bytes()));
            let mut fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&sealed).unwrap();
            assert!(fields.remove("checksum").unwrap().as_str().unwrap().starts_with("crc64nvme:"));
            assert_eq!(serde_json::Value::Object(fields), serde_json::json!({"a": [1, {}]}));
        }
        assert_eq!(seal("[1]"), None);
        assert_eq!(seal(""), None);
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_found() {
        let sealed = seal("{\"a\": \"\u{e4}\", \"b\": 12}").unwrap().into_bytes();
        for bit in 0..8 * sealed.len() {
            let mut changed = sealed.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_intact(&changed), "bit {bit}");
        }
        for length in 0..sealed.len() {
            assert!(!is_intact(&sealed[..length]), "cut to {length}");
        }
        assert!(!is_intact(&[&sealed[..], b"\n"].concat()));
    }
}
