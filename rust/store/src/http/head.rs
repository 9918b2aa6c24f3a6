//! The heads of requests and of answers, as they come from anybody.
//!
//! `httparse` takes them apart; what is made of it is checked here. What always holds: nothing is kept of a head but
//! what this crate acts on; a length that is not told beyond doubt is refused, for who errs there takes bytes of one
//! request for another.

use super::range::Asked;
use super::refusal::Refusal;

/// No head takes more bytes.
pub const LONGEST_HEAD: usize = 16 << 10;

/// No head has more fields.
const MOST_FIELDS: usize = 64;

/// By this header who asks says on which node it runs, if it can read memory of that node.
pub(super) const NODE_FIELD: &str = "Tundish-Node";

/// What may be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Read.
    Get,
    /// Read, and tell only the head of the answer.
    Head,
    /// Store.
    Put,
    /// Do.
    Post,
    /// Remove.
    Delete,
}

/// The form of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Shards: for each a header and its bytes.
    Shards,
    /// JSON, with bytes in base64.
    Json,
}

impl Form {
    /// Its media type.
    pub fn media_type(self) -> &'static str {
        match self {
            Form::Shards => "application/x-tundish-shards",
            Form::Json => "application/json",
        }
    }
}

/// What is kept of the head of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestHead {
    /// What is to be done.
    pub method: Method,
    /// To what: a path, as it came.
    pub path: String,
    /// Whether the connection is to be kept for the next one.
    pub keeps_alive: bool,
    /// Bytes of the body; `None` where it has none.
    pub content_length: Option<u64>,
    /// Whether it waits to be told to go on before it sends the body.
    pub expects_continue: bool,
    /// What the body is.
    pub content: Form,
    /// What the answer is to be.
    pub accepts: Form,
    /// The part that is asked for.
    pub range: Option<Asked>,
    /// The value of `Authorization`.
    pub authorization: Option<Vec<u8>>,
    /// The node that it says it runs on.
    pub node: Option<String>,
    /// The value of `Host`.
    pub host: Option<String>,
    /// Whether a page in a browser sent it.
    pub is_of_a_page: bool,
}

impl RequestHead {
    /// The head that `bytes` begin with, and its length; `None` where they end before it does.
    ///
    /// # Errors
    /// A [`Refusal`], after which nothing on the connection can be trusted.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, Refusal> {
        let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
        let mut request = httparse::Request::new(&mut fields);
        let length = match request.parse(bytes) {
            Ok(httparse::Status::Complete(length)) if length <= LONGEST_HEAD => length,
            Ok(httparse::Status::Partial) if bytes.len() < LONGEST_HEAD => return Ok(None),
            Ok(_) | Err(httparse::Error::TooManyHeaders) => {
                let most = format!("a request's head has at most {LONGEST_HEAD} bytes and {MOST_FIELDS} fields");
                return Err(Refusal::new(431, most));
            }
            Err(error) => return Err(Refusal::new(400, format!("this is not HTTP/1.1: {error}"))),
        };
        let method = method(request.method.unwrap_or_default())?;
        let mut head = RequestHead {
            method,
            path: path(request.path.unwrap_or_default())?,
            keeps_alive: request.version == Some(1),
            content_length: None,
            expects_continue: false,
            content: Form::Shards,
            accepts: Form::Json,
            range: None,
            authorization: None,
            node: None,
            host: None,
            is_of_a_page: false,
        };
        request.headers.iter().try_for_each(|field| head.take(field.name, field.value))?;
        if head.host.is_none() && request.version == Some(1) {
            return Err(Refusal::new(400, "a request of HTTP/1.1 names the host"));
        }
        Ok(Some((head, length)))
    }

    fn take(&mut self, name: &str, value: &[u8]) -> Result<(), Refusal> {
        let text = || std::str::from_utf8(value).unwrap_or_default();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => {
                let length = content_length(value)?;
                if self.content_length.is_some_and(|before| before != length) {
                    return Err(Refusal::new(400, "it tells two lengths"));
                }
                self.content_length = Some(length);
            }
            "transfer-encoding" => {
                return Err(Refusal::new(411, "tell the length of the body beforehand, in `Content-Length`"));
            }
            "connection" => self.keeps_alive = keeps_alive(text()).unwrap_or(self.keeps_alive),
            "expect" => {
                if !text().eq_ignore_ascii_case("100-continue") {
                    return Err(Refusal::new(417, "only `100-continue` can be expected"));
                }
                self.expects_continue = true;
            }
            "content-type" if is(text(), Form::Json) => self.content = Form::Json,
            // Who knows no better form gets the one that everybody reads: most send `*/*`, or nothing.
            "accept" if text().split(',').any(|accepted| is(accepted, Form::Shards)) => self.accepts = Form::Shards,
            "range" => self.range = Asked::parse(text()),
            "authorization" => self.authorization = Some(value.to_vec()),
            "host" => {
                let before = self.host.replace(text().to_owned());
                before.map_or(Ok(()), |_| Err(Refusal::new(400, "it names two hosts")))?;
            }
            "origin" => self.is_of_a_page = true,
            // What somebody types into a browser comes of no page.
            "sec-fetch-site" => self.is_of_a_page |= text() != "none",
            _ if name.eq_ignore_ascii_case(NODE_FIELD) => self.node = Some(text().to_owned()),
            _ => {}
        }
        Ok(())
    }
}

/// What is kept of the head of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerHead {
    /// The status.
    pub status: u16,
    /// Bytes of the body.
    pub content_length: u64,
    /// Whether the connection is kept.
    pub keeps_alive: bool,
}

impl AnswerHead {
    /// The head that `bytes` begin with, and its length; `None` where they end before it does.
    ///
    /// # Errors
    /// In words, what is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
        let mut answer = httparse::Response::new(&mut fields);
        let length = match answer.parse(bytes) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) if bytes.len() < LONGEST_HEAD => return Ok(None),
            Ok(httparse::Status::Partial) => return Err(format!("its head has more than {LONGEST_HEAD} bytes")),
            Err(error) => return Err(format!("that is not HTTP/1.1: {error}")),
        };
        let mut keeps = answer.version == Some(1);
        let mut content_length = None;
        for field in answer.headers.iter() {
            let text = std::str::from_utf8(field.value).unwrap_or_default();
            match field.name.to_ascii_lowercase().as_str() {
                "content-length" => {
                    content_length = Some(self::content_length(field.value).map_err(|refusal| refusal.reason)?);
                }
                "transfer-encoding" => return Err("it does not tell the length of its body".to_owned()),
                "connection" => keeps = keeps_alive(text).unwrap_or(keeps),
                _ => {}
            }
        }
        let status = answer.code.unwrap_or_default();
        // What only says that an answer follows has no body.
        let content_length = content_length.or((status < 200).then_some(0));
        let content_length = content_length.ok_or("it does not tell the length of its body")?;
        Ok(Some((AnswerHead { status, content_length, keeps_alive: keeps }, length)))
    }
}

fn method(name: &str) -> Result<Method, Refusal> {
    Ok(match name {
        "GET" => Method::Get,
        "HEAD" => Method::Head,
        "PUT" => Method::Put,
        "POST" => Method::Post,
        "DELETE" => Method::Delete,
        _ => return Err(Refusal::new(501, format!("nothing here is done by {name}"))),
    })
}

/// The path of a target, which may name a host before it, and a query that nothing here looks at.
fn path(target: &str) -> Result<String, Refusal> {
    let after_host = target.strip_prefix("http://").map(|rest| rest.find('/').map_or("/", |slash| &rest[slash..]));
    let path = after_host.unwrap_or(target).split(['?', '#']).next().unwrap_or_default();
    if path.starts_with('/') { Ok(path.to_owned()) } else { Err(Refusal::new(400, "a target begins with '/'")) }
}

/// Digits alone: `parse` would take a sign.
fn content_length(value: &[u8]) -> Result<u64, Refusal> {
    let text = std::str::from_utf8(value).unwrap_or_default();
    let digits = (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())).then_some(text);
    let length = digits.and_then(|digits| digits.parse().ok());
    length.ok_or_else(|| Refusal::new(400, "its `Content-Length` is no length"))
}

fn keeps_alive(value: &str) -> Option<bool> {
    let has = |wanted: &str| value.split(',').any(|option| option.trim().eq_ignore_ascii_case(wanted));
    if has("close") { Some(false) } else { has("keep-alive").then_some(true) }
}

fn is(media_type: &str, form: Form) -> bool {
    let name = media_type.split(';').next().unwrap_or_default().trim();
    name.eq_ignore_ascii_case(form.media_type())
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::http::range::Unit;

    fn parse(text: &str) -> Result<Option<(RequestHead, usize)>, Refusal> {
        RequestHead::parse(text.as_bytes())
    }

    fn head(fields: &str) -> RequestHead {
        parse(&format!("PUT /data/a HTTP/1.1\r\nHost: b\r\n{fields}\r\n")).expect("a head").expect("whole").0
    }

    fn status(text: &str) -> u16 {
        parse(text).expect_err(text).status
    }

    #[test]
    fn what_curl_sends_is_understood() {
        let text = "PUT /data/a%3Ab?x=1 HTTP/1.1\r\nHost: 127.0.0.1:7\r\nUser-Agent: curl/8\r\nAccept: */*\r\n\
                    Content-Length: 2097152\r\nExpect: 100-continue\r\n\r\nbody";
        let (head, length) = parse(text).unwrap().unwrap();
        assert_eq!((head.method, head.path.as_str()), (Method::Put, "/data/a%3Ab"));
        assert_eq!((head.content_length, head.expects_continue, head.keeps_alive), (Some(2 << 20), true, true));
        assert_eq!((head.accepts, head.content, length), (Form::Json, Form::Shards, text.len() - 4));
    }

    #[test]
    fn fields_have_their_meaning_in_any_case() {
        let shards = "ACCEPT: application/json, Application/X-tundish-Shards;q=0.9\r\n";
        let mixed = head(&format!("{shards}content-TYPE: Application/JSON; charset=utf-8\r\n"));
        assert_eq!((mixed.accepts, mixed.content), (Form::Shards, Form::Json));
        for any in ["", "Accept: */*\r\n", "Accept: application/*, application/octet-stream\r\n"] {
            assert_eq!(head(any).accepts, Form::Json, "{any:?}");
        }
        assert!(!head("Connection: foo, Close\r\n").keeps_alive);
        assert_eq!(head("Range: rows=1-2\r\n").range.unwrap().unit, Unit::Rows);
        assert_eq!(head("range: lines=1-2\r\n").range, None);
        assert_eq!(head("AUTHORIZATION: Bearer x\r\n").authorization.unwrap(), b"Bearer x");
        assert_eq!(head("tundish-NODE: n\r\n").node.as_deref(), Some("n"));
        assert!(head("Origin: http://evil.example\r\n").is_of_a_page);
        assert_eq!(head("Content-Length: 5\r\nContent-Length: 5\r\n").content_length, Some(5));
    }

    #[test]
    fn old_clients_and_proxies_are_understood() {
        let (old, _) = parse("GET / HTTP/1.0\r\n\r\n").unwrap().unwrap();
        assert!(!old.keeps_alive);
        assert!(parse("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").unwrap().unwrap().0.keeps_alive);
        let (absolute, _) = parse("GET http://a:1/stats?b HTTP/1.1\r\nHost: a:1\r\n\r\n").unwrap().unwrap();
        assert_eq!(absolute.path, "/stats");
    }

    #[test]
    fn a_length_that_is_in_doubt_is_refused() {
        for length in ["+5", "-5", "5, 6", "0x5", "", " ", "18446744073709551616", "5\r\nContent-Length: 6"] {
            assert_eq!(
                status(&format!("PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n")),
                400,
                "{length}"
            );
        }
        let chunked = "PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(status(chunked), 411);
    }

    #[test]
    fn heads_that_are_no_heads_are_refused() {
        for bad in ["GET\r\n\r\n", "\u{1}\u{2}\u{3}", "GET / HTTP/2.0\r\n\r\n", "GET / HTTP/1.1\r\nno colon\r\n\r\n"] {
            assert_eq!(status(bad), 400, "{bad:?}");
        }
        assert_eq!(status("GET / HTTP/1.1\r\n\r\n"), 400);
        assert_eq!(status("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), 400);
        assert_eq!(status("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n"), 501);
        assert_eq!(status("GET data HTTP/1.1\r\nHost: a\r\n\r\n"), 400);
        assert_eq!(status("GET / HTTP/1.1\r\nHost: a\r\nExpect: a miracle\r\n\r\n"), 417);
        let many = "a: b\r\n".repeat(65);
        assert_eq!(status(&format!("GET / HTTP/1.1\r\nHost: a\r\n{many}\r\n")), 431);
        let long = "a".repeat(LONGEST_HEAD);
        assert_eq!(status(&format!("GET /{long}")), 431);
        assert_eq!(status(&format!("GET / HTTP/1.1\r\nHost: a\r\na: {long}\r\n\r\n")), 431);
    }

    #[test]
    fn answers_have_a_length() {
        let text = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc";
        let (answer, length) = AnswerHead::parse(text).unwrap().unwrap();
        assert_eq!((answer.status, answer.content_length, answer.keeps_alive), (200, 3, true));
        assert_eq!(length, text.len() - 3);
        assert!(AnswerHead::parse(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
        assert!(AnswerHead::parse(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").is_err());
        assert!(AnswerHead::parse(b"SSH-2.0-OpenSSH_9.6\r\n").is_err());
        assert!(AnswerHead::parse(b"H").unwrap().is_none());
    }

    proptest! {
        #[test]
        fn a_head_is_read_the_same_however_it_comes(
            path in "/[a-zA-Z0-9._:-]{0,40}",
            length: u64,
            node in "[a-f0-9-]{1,40}",
            behind in vec(any::<u8>(), 0..20),
        ) {
            let text = format!("POST {path} HTTP/1.1\r\nHost: h\r\ncontent-length: {length}\r\nTundish-Node: {node}\r\n\r\n");
            let mut bytes = text.into_bytes();
            let whole = bytes.len();
            for end in 0..whole {
                prop_assert_eq!(RequestHead::parse(&bytes[..end]).unwrap(), None);
            }
            bytes.extend(behind);
            let (head, taken) = RequestHead::parse(&bytes).unwrap().unwrap();
            prop_assert_eq!((head.path, head.content_length, head.node), (path, Some(length), Some(node)));
            prop_assert_eq!(taken, whole);
        }

        #[test]
        fn whatever_comes_is_read_or_refused(bytes in vec(any::<u8>(), 0..300), begun in "(GET|PUT) /[a-z]{0,3}") {
            let _ = RequestHead::parse(&bytes);
            let _ = RequestHead::parse(&[begun.as_bytes(), &bytes].concat());
            let _ = AnswerHead::parse(&[b"HTTP/1.1 200 OK\r\n", &bytes[..]].concat());
        }
    }
}
