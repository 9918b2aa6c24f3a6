//! Answers: their heads, and the JSON of those that refuse.

use serde::Serialize;

use super::body::Body;
use super::rooms::Aside;
use crate::error::StoreError;
use crate::http::head::Form;
use crate::http::json::Refused;
use crate::http::refusal::Refusal;

/// An answer to a request.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    media_type: &'static str,
    /// Fields beside those that every answer has: name and value.
    fields: Vec<(&'static str, String)>,
    pub(super) body: Body,
    /// Memory that was set aside for it.
    pub(super) aside: Option<Aside>,
}

impl Answer {
    pub(super) fn new(status: u16, form: Form, body: Body) -> Self {
        Answer { status, media_type: form.media_type(), fields: Vec::new(), body, aside: None }
    }

    pub(super) fn text(media_type: &'static str, text: String) -> Self {
        Answer { status: 200, media_type, fields: Vec::new(), body: Body::of_text(text), aside: None }
    }

    pub(super) fn json(status: u16, value: &impl Serialize) -> Self {
        let text = serde_json::to_vec(value).expect("all that is told has a form in JSON");
        Answer::new(status, Form::Json, Body::of_text(text))
    }

    pub(super) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.fields.push((name, value.into()));
        self
    }

    /// The error of a request that is about steps or batches.
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
            StoreError::StepEnded { epoch } => refused.ended_epoch = Some(*epoch),
            StoreError::StepTaken { epoch } => refused.taken_epoch = Some(*epoch),
            _ => {}
        }
        let status = if refused.missing_shard_ids.is_empty() { refusal.status } else { 400 };
        Answer::json(status, &refused)
    }

    pub(super) fn head(&self, keeps_alive: bool) -> Vec<u8> {
        let (status, reason, media_type) = (self.status, reason(self.status), self.media_type);
        let length = self.body.len();
        let mut head =
            format!("HTTP/1.1 {status} {reason}\r\nContent-Type: {media_type}\r\nContent-Length: {length}\r\n");
        for (name, value) in &self.fields {
            head += &format!("{name}: {value}\r\n");
        }
        head += if keeps_alive { "\r\n" } else { "Connection: close\r\n\r\n" };
        head.into_bytes()
    }
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Self {
        let answer = Answer::json(refusal.status, &refused(&refusal));
        match (refusal.status, refusal.allowed) {
            (401, _) => answer.with("WWW-Authenticate", "Bearer"),
            (_, Some(allowed)) => answer.with("Allow", allowed),
            _ => answer,
        }
    }
}

fn refused(refusal: &Refusal) -> Refused {
    Refused { status: "error".to_owned(), message: refusal.reason.clone(), ..Refused::default() }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        206 => "Partial Content",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        411 => "Length Required",
        413 => "Content Too Large",
        416 => "Range Not Satisfiable",
        417 => "Expectation Failed",
        422 => "Unprocessable Content",
        431 => "Request Header Fields Too Large",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        507 => "Insufficient Storage",
        _ => "Internal Server Error",
    }
}
