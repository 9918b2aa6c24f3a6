//! The two media types of bodies.

/// The media type of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaType {
    /// Shards: for each a header and its bytes.
    Shards,
    /// JSON, with bytes in base64.
    Json,
}

impl MediaType {
    /// Its name in `Content-Type` and `Accept`.
    pub fn name(self) -> &'static str {
        match self {
            MediaType::Shards => "application/x-tundish-shards",
            MediaType::Json => "application/json",
        }
    }

    /// Whether a header names it, with or without parameters.
    pub(super) fn matches(self, text: &str) -> bool {
        let name = text.split(';').next().unwrap_or_default().trim();
        name.eq_ignore_ascii_case(self.name())
    }
}
