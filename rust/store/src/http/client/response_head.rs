//! The head of a response, as a client reads it from an owner that it does not trust.
//!
//! `httparse` takes it apart. A response whose length is in doubt is refused: its bytes could be taken for those of the
//! next one.

/// Bytes of the longest head.
const LONGEST_HEAD: usize = 16 << 10;

/// The most fields of a head.
const MAX_FIELDS: usize = 64;

/// The head of a response, as far as a client acts on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseHead {
    /// The status.
    pub status: u16,
    /// Bytes of the body.
    pub content_length: u64,
    /// Whether the connection is kept.
    pub keeps_alive: bool,
}

impl ResponseHead {
    /// The head that `bytes` begin with, and its length; `None` where they end before it does.
    ///
    /// # Errors
    /// A description of the error.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut response = httparse::Response::new(&mut fields);
        let length = match response.parse(bytes) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) if bytes.len() < LONGEST_HEAD => return Ok(None),
            Ok(httparse::Status::Partial) => return Err(format!("its head has more than {LONGEST_HEAD} bytes")),
            Err(error) => return Err(format!("that is not HTTP/1.1: {error}")),
        };
        let mut keeps = response.version == Some(1);
        let mut content_length = None;
        for field in response.headers.iter() {
            let text = std::str::from_utf8(field.value).unwrap_or_default();
            match field.name.to_ascii_lowercase().as_str() {
                "content-length" => {
                    let length = self::content_length(field.value).ok_or("its `Content-Length` is no length")?;
                    content_length = Some(length);
                }
                "transfer-encoding" => return Err("it does not tell the length of its body".to_owned()),
                "connection" => keeps = keeps_alive(text).unwrap_or(keeps),
                _ => {}
            }
        }
        let status = response.code.unwrap_or_default();
        // An interim response has no body.
        let content_length = content_length.or((status < 200).then_some(0));
        let content_length = content_length.ok_or("it does not tell the length of its body")?;
        Ok(Some((ResponseHead { status, content_length, keeps_alive: keeps }, length)))
    }
}

/// Digits alone: `parse` would take a sign.
fn content_length(value: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(value).unwrap_or_default();
    let digits = (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())).then_some(text);
    digits.and_then(|digits| digits.parse().ok())
}

fn keeps_alive(value: &str) -> Option<bool> {
    let has = |wanted: &str| value.split(',').any(|option| option.trim().eq_ignore_ascii_case(wanted));
    if has("close") { Some(false) } else { has("keep-alive").then_some(true) }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_head_is_read_with_its_length() {
        let text = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc";
        let (head, length) = ResponseHead::parse(text).unwrap().unwrap();
        assert_eq!((head.status, head.content_length, head.keeps_alive), (200, 3, true));
        assert_eq!(length, text.len() - 3);
        assert!(ResponseHead::parse(b"H").unwrap().is_none());
    }

    #[test]
    fn a_response_without_a_certain_length_is_refused() {
        let fields = ["", "Transfer-Encoding: chunked\r\n", "Content-Length: +5\r\n", "Content-Length: 5, 6\r\n"];
        for fields in fields {
            let text = format!("HTTP/1.1 200 OK\r\n{fields}\r\n");
            assert!(ResponseHead::parse(text.as_bytes()).is_err(), "{fields}");
        }
        assert!(ResponseHead::parse(b"SSH-2.0-OpenSSH_9.6\r\n").is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..300)) {
            let _ = ResponseHead::parse(&bytes);
            let _ = ResponseHead::parse(&[b"HTTP/1.1 200 OK\r\n", &bytes[..]].concat());
        }
    }
}
