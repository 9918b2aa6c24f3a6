//! The vocabulary of requests: routes, media types of bodies, and refusals.

use hyper::Method;

use crate::Step;
use crate::error::StoreError;
use crate::shard_id::{InvalidShardId, ShardId};

/// The largest number of a step: every reader of JSON represents it exactly.
const LAST_STEP: u64 = (1 << 53) - 1;

/// The action of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// `GET /data/<id>`
    Read(ShardId),
    /// `POST /data/batch`
    Batch,
    /// `DELETE /data/clear`
    Remove,
    /// `DELETE /buffer/clear`
    ClearBuffer,
    /// `GET /buffer/stats`
    BufferStats,
    /// `POST /keep`
    Keep,
    /// `POST /step/<step>/begin`; `<step>` is an id, or `<id>:<number>` with the caller's own number.
    Begin(Step),
    /// `POST /step/<step>/claim`
    Claim(Step),
    /// `POST /step/<step>/end`
    End(Step),
    /// `GET /stats`
    Stats,
    /// `GET /metrics`
    Metrics,
    /// `GET /health`
    Health,
}

impl Route {
    /// The route of a method and a path.
    ///
    /// # Errors
    /// 404 if there is none, 400 for an invalid name or number.
    pub fn of(method: &Method, path: &str) -> Result<Route, Refusal> {
        let parts: Vec<_> = path.split('/').skip(1).collect();
        Ok(match (&parts[..], method) {
            (["data", "batch"], &Method::POST) => Route::Batch,
            (["data", "clear"], &Method::DELETE) => Route::Remove,
            (["data", id], &Method::GET | &Method::HEAD) => {
                Route::Read(id.parse().map_err(|error: InvalidShardId| Refusal::new(400, error.to_string()))?)
            }
            (["buffer", "clear"], &Method::DELETE) => Route::ClearBuffer,
            (["buffer", "stats"], &Method::GET) => Route::BufferStats,
            (["keep"], &Method::POST) => Route::Keep,
            (["step", step, "begin"], &Method::POST) => Route::Begin(step_of(step)?),
            (["step", step, "claim"], &Method::POST) => Route::Claim(step_of(step)?),
            (["step", step, "end"], &Method::POST) => Route::End(step_of(step)?),
            (["stats"], &Method::GET) => Route::Stats,
            (["metrics"], &Method::GET) => Route::Metrics,
            (["health"], &Method::GET | &Method::HEAD) => Route::Health,
            _ => {
                let all = "/data/<id>, /data/batch, /buffer, /keep, /step, /stats, /metrics and /health";
                return Err(Refusal::new(404, format!("{method} does nothing here; there are {all}")));
            }
        })
    }
}

fn step_of(text: &str) -> Result<Step, Refusal> {
    let (id, number) = text.split_once(':').map_or((text, None), |(id, number)| (id, Some(number)));
    Ok(Step { id: step_number(id)?, number: number.map(step_number).transpose()? })
}

fn step_number(number: &str) -> Result<u64, Refusal> {
    let digits = number.bytes().all(|byte| byte.is_ascii_digit()).then_some(number);
    let step = digits.and_then(|digits| digits.parse().ok()).filter(|step| *step <= LAST_STEP);
    step.ok_or_else(|| Refusal::new(400, format!("a step has a number, from 0 to {LAST_STEP}")))
}

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

/// The status and the message of a request that is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The status.
    pub status: u16,
    /// The message: the error and its remedy.
    pub reason: String,
}

impl Refusal {
    /// A refusal with this status.
    pub fn new(status: u16, reason: impl Into<String>) -> Self {
        Refusal { status, reason: reason.into() }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        let status = match &error {
            StoreError::Invalid(_) => 400,
            StoreError::Missing { .. } => 404,
            StoreError::Exists { .. } | StoreError::StepEnded { .. } | StoreError::StepTaken { .. } => 409,
            StoreError::TooLarge { .. } => 413,
            StoreError::Full { .. } => 507,
            _ => 500,
        };
        Refusal::new(status, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> ShardId {
        text.parse().unwrap()
    }

    #[test]
    fn each_path_has_its_route() {
        const METHODS: [Method; 4] = [Method::DELETE, Method::GET, Method::HEAD, Method::POST];
        let [delete, get, head, post] = &METHODS;
        let routes = [
            (get, "/data/a.b:c_d-1", Route::Read(id("a.b:c_d-1"))),
            (head, "/data/x", Route::Read(id("x"))),
            (get, "/data/batch", Route::Read(id("batch"))),
            (post, "/data/batch", Route::Batch),
            (delete, "/data/clear", Route::Remove),
            (delete, "/buffer/clear", Route::ClearBuffer),
            (post, "/keep", Route::Keep),
            (get, "/buffer/stats", Route::BufferStats),
            (post, "/step/9007199254740991/end", Route::End(LAST_STEP.into())),
            (post, "/step/0/begin", Route::Begin(0.into())),
            (post, "/step/7/claim", Route::Claim(7.into())),
            (post, "/step/7:120/claim", Route::Claim(7.into())),
            (get, "/stats", Route::Stats),
            (get, "/metrics", Route::Metrics),
            (get, "/health", Route::Health),
        ];
        for (method, path, route) in routes {
            assert_eq!(Route::of(method, path), Ok(route), "{path}");
        }
    }

    #[test]
    fn unknown_paths_are_refused() {
        const METHODS: [Method; 4] = [Method::DELETE, Method::GET, Method::POST, Method::PUT];
        let [delete, get, post, put] = &METHODS;
        let refused = [
            (get, "/", 404),
            (get, "//data/x", 404),
            (get, "/data", 404),
            (get, "/data/x/y", 404),
            (get, "/data/", 400),
            (get, "/data/..%2Fetc", 400),
            (get, "/data/%", 400),
            (post, "/data/x", 404),
            (put, "/data/x", 404),
            (delete, "/data/x", 404),
            (get, "/step/1/end", 404),
            (post, "/step/1/flush", 404),
            (post, "/step/-1/end", 400),
            (post, "/step/1:/end", 400),
            (post, "/step/1:x/end", 400),
            (post, "/step/1:2:3/end", 400),
            (post, "/step/+1/end", 400),
            (post, "/step//end", 400),
            (post, "/step/9007199254740992/end", 400),
            (post, "/step/18446744073709551615/begin", 400),
            (post, "/step/18446744073709551616/end", 400),
            (post, "/step/1/end/2", 404),
            (post, "/step/1/stop", 404),
            (delete, "/stats", 404),
        ];
        for (method, path, status) in refused {
            let refusal = Route::of(method, path).expect_err(path);
            assert_eq!(refusal.status, status, "{path}");
        }
    }
}
