//! Requests to an owner.

use http_body_util::Full;
use hyper::Request;
use hyper::body::Bytes;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};

use crate::error::StoreError;
use crate::http::media_type::MediaType;
use crate::http::token::Token;

/// A request to an owner.
pub(super) type HttpRequest = Request<Full<Bytes>>;

/// A request whose answer is JSON. `body` is sent as JSON, where it is not empty.
pub(super) fn json_request(
    owner: &str,
    token: Option<&Token>,
    method: &str,
    path: &str,
    body: Vec<u8>,
) -> Result<HttpRequest, StoreError> {
    let json = MediaType::Json.name();
    let mut builder = Request::builder().method(method).uri(path).header(HOST, owner).header(ACCEPT, json);
    if !body.is_empty() {
        builder = builder.header(CONTENT_TYPE, json);
    }
    if let Some(token) = token {
        builder = builder.header(AUTHORIZATION, token.header());
    }
    let invalid = |error| StoreError::Invalid(format!("{method:?} {path:?} is no request to {owner}: {error}"));
    builder.body(Full::from(body)).map_err(invalid)
}
