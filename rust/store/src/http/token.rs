//! `Token`: the secret that a request has to carry.

use std::fmt;

use subtle::ConstantTimeEq;

use crate::error::StoreError;

/// The most characters of a token.
const LONGEST: usize = 1024;

/// A secret that both sides know, sent as `Authorization: Bearer …`.
#[derive(Clone)]
pub struct Token(Box<str>);

impl Token {
    /// A token of this text.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where it is empty, too long, or has characters that cannot stand in a header.
    pub fn new(text: &str) -> Result<Self, StoreError> {
        let is_fit = (1..=LONGEST).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
        is_fit.then(|| Token(text.into())).ok_or_else(|| {
            StoreError::Invalid(format!(
                "a token is 1 to {LONGEST} visible ASCII characters without spaces; make one with `openssl rand -hex 32`"
            ))
        })
    }

    /// The value of the header.
    pub(super) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// Whether the value of a header is this token. The time that this takes reveals its length and nothing else.
    pub(super) fn matches(&self, header: Option<&[u8]>) -> bool {
        let said = header.and_then(|value| value.split_at_checked("Bearer ".len()));
        said.is_some_and(|(scheme, said)| {
            scheme.eq_ignore_ascii_case(b"Bearer ") && bool::from(said.ct_eq(self.0.as_bytes()))
        })
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_is_the_token() {
        let token = Token::new("s3cret").unwrap();
        assert!(token.matches(Some(token.header().as_bytes())));
        assert!(token.matches(Some(b"bearer s3cret")));
        for wrong in
            ["", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cret2", "Bearer S3cret", "Basic s3cret", "s3cret"]
        {
            assert!(!token.matches(Some(wrong.as_bytes())), "{wrong}");
        }
        assert!(!token.matches(None));
        assert!(!format!("{token:?}").contains("s3cret"));
    }

    #[test]
    fn a_token_that_would_break_a_header_is_refused() {
        for text in ["", "a b", "a\r\nHost: b", "ü", &"a".repeat(1025)] {
            assert!(matches!(Token::new(text), Err(StoreError::Invalid(_))), "{text:?}");
        }
    }
}
