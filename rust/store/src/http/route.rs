//! What a request is about: its method and its path.

use hyper::Method;

use super::refusal::Refusal;
use crate::Epoch;
use crate::shard_id::ShardId;

/// The largest number of a step that is taken: all readers of JSON have it exactly, and who counts on from it has space.
const LAST_EPOCH: Epoch = (1 << 53) - 1;

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// `GET /data/<id>`
    Read(ShardId),
    /// `PUT /data/<id>`
    Store(ShardId),
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
    /// `POST /epoch/<number>/begin`
    Begin(Epoch),
    /// `POST /epoch/<number>/claim`
    Claim(Epoch),
    /// `POST /epoch/<number>/close`
    Close(Epoch),
    /// `POST /epoch/<number>/end`
    End(Epoch),
    /// `GET /stats`
    Stats,
    /// `GET /metrics`
    Metrics,
    /// `GET /health`
    Health,
}

impl Route {
    /// Where this leads.
    ///
    /// # Errors
    /// 404 where it leads nowhere, 405 where the method does not fit, 400 for a name that no shard has.
    pub fn of(method: &Method, path: &str) -> Result<Route, Refusal> {
        let mut parts = path.split('/').skip(1);
        let named = [parts.next(), parts.next(), parts.next(), parts.next()];
        let method = if method == Method::HEAD { &Method::GET } else { method };
        match (named, method) {
            ([Some("data"), Some("batch"), None, _], &Method::POST) => Ok(Route::Batch),
            ([Some("data"), Some("clear"), None, _], &Method::DELETE) => Ok(Route::Remove),
            ([Some("data"), Some(id), None, _], &Method::GET) => Ok(Route::Read(shard_id(id)?)),
            ([Some("data"), Some(id), None, _], &Method::PUT) => Ok(Route::Store(shard_id(id)?)),
            ([Some("data"), Some(id), None, _], _) => Err(not_allowed(match id {
                "batch" => "GET, HEAD, PUT, POST",
                "clear" => "GET, HEAD, PUT, DELETE",
                _ => "GET, HEAD, PUT",
            })),
            ([Some("buffer"), Some("clear"), None, _], &Method::DELETE) => Ok(Route::ClearBuffer),
            ([Some("buffer"), Some("clear"), None, _], _) => Err(not_allowed("DELETE")),
            ([Some("buffer"), Some("stats"), None, _], &Method::GET) => Ok(Route::BufferStats),
            ([Some("keep"), None, ..], &Method::POST) => Ok(Route::Keep),
            ([Some("keep"), None, ..], _) => Err(not_allowed("POST")),
            ([Some("epoch"), Some(number), Some("begin"), None], &Method::POST) => Ok(Route::Begin(epoch(number)?)),
            ([Some("epoch"), Some(number), Some("claim"), None], &Method::POST) => Ok(Route::Claim(epoch(number)?)),
            ([Some("epoch"), Some(number), Some("close"), None], &Method::POST) => Ok(Route::Close(epoch(number)?)),
            ([Some("epoch"), Some(number), Some("end"), None], &Method::POST) => Ok(Route::End(epoch(number)?)),
            ([Some("epoch"), Some(_), Some("begin" | "claim" | "close" | "end"), None], _) => Err(not_allowed("POST")),
            ([Some("stats"), None, ..], &Method::GET) => Ok(Route::Stats),
            ([Some("metrics"), None, ..], &Method::GET) => Ok(Route::Metrics),
            ([Some("health"), None, ..], &Method::GET) => Ok(Route::Health),
            ([Some("buffer"), Some("stats"), None, _] | [Some("stats" | "metrics" | "health"), None, ..], _) => {
                Err(not_allowed("GET, HEAD"))
            }
            _ => Err(Refusal::new(
                404,
                "there is nothing here; see /data/<id>, /buffer, /keep, /epoch, /stats, /metrics, /health",
            )),
        }
    }
}

fn not_allowed(allowed: &'static str) -> Refusal {
    Refusal { allowed: Some(allowed), ..Refusal::new(405, format!("this is not done here, but: {allowed}")) }
}

fn epoch(number: &str) -> Result<Epoch, Refusal> {
    let digits = number.bytes().all(|byte| byte.is_ascii_digit()).then_some(number);
    let epoch = digits.and_then(|digits| digits.parse().ok()).filter(|epoch| *epoch <= LAST_EPOCH);
    epoch.ok_or_else(|| Refusal::new(400, format!("a step has a number, from 0 to {LAST_EPOCH}")))
}

fn shard_id(encoded: &str) -> Result<ShardId, Refusal> {
    let refuse = |reason: String| Refusal::new(400, reason);
    if !encoded.contains('%') {
        return encoded.parse().map_err(|error: crate::StoreError| refuse(error.to_string()));
    }
    let mut rest = encoded.bytes();
    let mut decoded = String::new();
    while let Some(byte) = rest.next() {
        let character = if byte == b'%' {
            let mut digit = || rest.next().and_then(|digit| (digit as char).to_digit(16));
            let (high, low) = (digit(), digit());
            let code = high.zip(low).and_then(|(high, low)| u8::try_from(high << 4 | low).ok());
            code.ok_or_else(|| refuse("a '%' in a path is followed by two hexadecimal digits".to_owned()))?
        } else {
            byte
        };
        decoded.push(character as char);
    }
    decoded.parse().map_err(|error: crate::StoreError| refuse(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> ShardId {
        text.parse().unwrap()
    }

    #[test]
    fn each_path_leads_to_what_the_interface_says() {
        const METHODS: [Method; 5] = [Method::DELETE, Method::GET, Method::HEAD, Method::POST, Method::PUT];
        let [delete, get, head, post, put] = &METHODS;
        let routes = [
            (put, "/data/a.b:c_d-1", Route::Store(id("a.b:c_d-1"))),
            (get, "/data/x%3Ay", Route::Read(id("x:y"))),
            (head, "/data/x", Route::Read(id("x"))),
            (get, "/data/batch", Route::Read(id("batch"))),
            (post, "/data/batch", Route::Batch),
            (delete, "/data/clear", Route::Remove),
            (delete, "/buffer/clear", Route::ClearBuffer),
            (post, "/keep", Route::Keep),
            (get, "/buffer/stats", Route::BufferStats),
            (post, "/epoch/9007199254740991/end", Route::End(LAST_EPOCH)),
            (post, "/epoch/0/begin", Route::Begin(0)),
            (post, "/epoch/7/claim", Route::Claim(7)),
            (post, "/epoch/7/close", Route::Close(7)),
            (get, "/stats", Route::Stats),
            (get, "/metrics", Route::Metrics),
            (get, "/health", Route::Health),
        ];
        for (method, path, route) in routes {
            assert_eq!(Route::of(method, path), Ok(route), "{path}");
        }
    }

    #[test]
    fn what_leads_nowhere_is_refused_with_the_status_that_says_so() {
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
            (get, "/data/%+1", 400),
            (get, "/data/%ff", 400),
            (post, "/data/x", 405),
            (delete, "/data/x", 405),
            (put, "/buffer/stats", 405),
            (post, "/buffer/clear", 405),
            (delete, "/keep", 405),
            (get, "/epoch/1/end", 405),
            (delete, "/epoch/1/close", 405),
            (post, "/epoch/1/flush", 404),
            (post, "/epoch/-1/end", 400),
            (post, "/epoch/+1/end", 400),
            (post, "/epoch//end", 400),
            (post, "/epoch/9007199254740992/end", 400),
            (post, "/epoch/18446744073709551615/begin", 400),
            (post, "/epoch/18446744073709551616/end", 400),
            (post, "/epoch/1/end/2", 404),
            (post, "/epoch/1/stop", 404),
            (delete, "/stats", 405),
        ];
        for (method, path, status) in refused {
            let refusal = Route::of(method, path).expect_err(path);
            assert_eq!((refusal.status, refusal.allowed.is_some()), (status, status == 405), "{path}");
        }
    }
}
