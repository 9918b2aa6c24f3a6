//! What becomes of requests to many owners.

use std::thread::sleep;

use super::*;
use crate::shard_id::Selection;

enum Owner {
    Silent,
    Gone,
}

impl Request for Owner {
    fn send(&mut self, _: &dyn Transport, time_limit: &mut TimeLimit<'_>) -> Result<(), StoreError> {
        if matches!(self, Owner::Gone) {
            return Err(StoreError::Unanswered { owner: "gone".into(), reason: "refused".to_owned() });
        }
        while !time_limit.is_over() {
            sleep(time_limit.turn());
            time_limit.look()?;
        }
        Err(StoreError::TimedOut { what: "an answer".to_owned() })
    }
}

struct Nothing;

impl Transport for Nothing {
    fn fetch(
        &self,
        owner: &Arc<str>,
        _: &[Selection],
        _: &mut dyn Receiver,
        _: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError> {
        Err(StoreError::Unanswered { owner: Arc::clone(owner), reason: "nobody is asked through it".to_owned() })
    }
}

#[test]
fn of_an_owner_that_is_gone_the_caller_hears_behind_many_that_are_silent() {
    let mut owners: Vec<_> = (0..4 * MOST_AT_ONCE).map(|_| Owner::Silent).collect();
    owners.push(Owner::Gone);
    let (begun, mut go_on) = (Instant::now(), || Ok(()));
    let mut time_limit = TimeLimit::new(begun + Duration::from_secs(20), &mut go_on);
    let error = send_all(owners, &Nothing, &mut time_limit).unwrap_err();
    assert!(matches!(error, StoreError::Unanswered { .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}
