//! Responses. Their bodies borrow the shards that they send.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::Response;
use hyper::body::{Body, Bytes, Frame, SizeHint};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue, WWW_AUTHENTICATE};
use serde::Serialize;

use super::connections::Connection;
use crate::error::StoreError;
use crate::http::json::{self, Base64, ErrorAnswer};
use crate::http::route::MediaType;
use crate::http::route::Refusal;
use crate::memory::tensor::OutgoingShard;

/// Pieces smaller than this are sent together.
const SMALL: usize = 8 << 10;

/// Bytes of small pieces that are sent together.
const GATHERED: usize = 64 << 10;

/// A body: texts, and the bytes of shards where they lie.
#[derive(Default)]
pub(super) struct ResponseBody {
    pieces: VecDeque<BodyPiece>,
    /// The connection that is told when all of it is handed over.
    connection: Option<Arc<Connection>>,
}

#[derive(Clone)]
enum BodyPiece {
    /// Bytes as they are.
    Bytes(Bytes),
    /// Bytes of a shard that are sent in base64.
    Base64(Bytes, Base64),
}

/// Keeps the memory of a shard for as long as any of it is being sent.
struct ShardBytes(OutgoingShard);

impl AsRef<[u8]> for ShardBytes {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl BodyPiece {
    fn len(&self) -> u64 {
        match self {
            BodyPiece::Bytes(bytes) => bytes.len() as u64,
            BodyPiece::Base64(bytes, encoding) => encoding.len(bytes.len() as u64),
        }
    }
}

impl ResponseBody {
    /// Appends a text.
    pub(super) fn text(&mut self, text: impl Into<Bytes>) {
        self.pieces.push_back(BodyPiece::Bytes(text.into()));
    }

    /// Appends the bytes of a shard.
    pub(super) fn bytes(&mut self, shard: OutgoingShard) {
        self.pieces.push_back(BodyPiece::Bytes(Bytes::from_owner(ShardBytes(shard))));
    }

    /// Appends a shard in JSON.
    pub(super) fn json(&mut self, shard: OutgoingShard) {
        let encoding = Base64::of(shard.meta());
        self.text(json::text_before_data(shard.meta()));
        self.pieces.push_back(BodyPiece::Base64(Bytes::from_owner(ShardBytes(shard)), encoding));
        self.text(json::TEXT_AFTER_DATA);
    }

    /// How many pieces there are: a range of them can be appended again.
    pub(super) fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Appends these pieces once more, without copying their bytes.
    pub(super) fn repeat(&mut self, pieces: Range<usize>) {
        for place in pieces {
            self.pieces.push_back(self.pieces[place].clone());
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.pieces.iter().map(BodyPiece::len).sum()
    }

    fn next_piece(&mut self) -> Option<Bytes> {
        match self.pieces.front_mut()? {
            BodyPiece::Base64(bytes, encoding) => {
                let some = bytes.split_to(bytes.len().min(json::STRIDE));
                let mut text = String::new();
                encoding.write(&some, &mut text);
                if bytes.is_empty() {
                    self.pieces.pop_front();
                }
                Some(text.into())
            }
            BodyPiece::Bytes(_) => match self.pieces.pop_front() {
                Some(BodyPiece::Bytes(bytes)) => Some(bytes),
                _ => None,
            },
        }
    }

    fn next_frame(&mut self) -> Option<Bytes> {
        let is_small = |piece: &BodyPiece| matches!(piece, BodyPiece::Bytes(bytes) if bytes.len() < SMALL);
        let first = self.next_piece()?;
        if first.len() >= SMALL || !self.pieces.front().is_some_and(is_small) {
            return Some(first);
        }
        let mut gathered = first.to_vec();
        while gathered.len() < GATHERED && self.pieces.front().is_some_and(is_small) {
            gathered.extend_from_slice(&self.next_piece()?);
        }
        Some(gathered.into())
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.get_mut().next_frame().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.len())
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        if let Some(connection) = &self.connection {
            connection.note_answered();
        }
    }
}

/// A response before it is sent.
pub(super) struct Answer(Response<ResponseBody>);

impl Answer {
    pub(super) fn new(status: u16, media_type: &'static str, body: ResponseBody) -> Self {
        let mut response = Response::new(body);
        *response.status_mut() = status.try_into().expect("a status of HTTP");
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
        Answer(response)
    }

    pub(super) fn text(media_type: &'static str, text: String) -> Self {
        let mut body = ResponseBody::default();
        body.text(text);
        Answer::new(200, media_type, body)
    }

    pub(super) fn json(status: u16, value: &impl Serialize) -> Self {
        let mut body = ResponseBody::default();
        body.text(serde_json::to_vec(value).expect("all that is answered has a form in JSON"));
        Answer::new(status, MediaType::Json.name(), body)
    }

    fn with(mut self, name: HeaderName, value: &'static str) -> Self {
        self.0.headers_mut().insert(name, HeaderValue::from_static(value));
        self
    }

    /// The last one of its connection.
    pub(super) fn closes(self) -> Self {
        self.with(CONNECTION, "close")
    }

    /// To be sent on this connection.
    pub(super) fn on(self, connection: &Arc<Connection>) -> Response<ResponseBody> {
        let mut response = self.0;
        response.body_mut().connection = Some(Arc::clone(connection));
        response
    }

    pub(super) fn status(&self) -> u16 {
        self.0.status().as_u16()
    }

    /// The error of a request about steps or batches.
    pub(super) fn error(error: &StoreError) -> Self {
        let refusal = Refusal::from(error.clone());
        let mut refused = refused(&refusal);
        match error {
            StoreError::Missing { shards, .. } => {
                let names = |only_removed: bool| {
                    let named = shards.iter().filter(|shard| shard.was_removed || !only_removed);
                    named.map(|shard| shard.id.to_string()).collect()
                };
                (refused.missing_shard_ids, refused.removed_shard_ids) = (names(false), names(true));
            }
            StoreError::StepEnded { step } => refused.ended_step = Some(*step),
            StoreError::StepTaken { step } => refused.taken_step = Some(*step),
            _ => {}
        }
        let status = if refused.missing_shard_ids.is_empty() { refusal.status } else { 400 };
        Answer::json(status, &refused)
    }
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Self {
        let answer = Answer::json(refusal.status, &refused(&refusal));
        if refusal.status == 401 { answer.with(WWW_AUTHENTICATE, "Bearer") } else { answer }
    }
}

fn refused(refusal: &Refusal) -> ErrorAnswer {
    ErrorAnswer { status: "error".to_owned(), message: refusal.reason.clone(), ..ErrorAnswer::default() }
}
