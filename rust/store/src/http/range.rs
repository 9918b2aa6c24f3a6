//! The header `Range`: some rows of a shard, or some bytes of its representation.

use std::ops::Range;

/// What a range counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes of the body, header included (RFC 9110, 14.1.2).
    Bytes,
    /// Rows of the tensor; its header then tells of these alone.
    Rows,
}

impl Unit {
    /// As `Range` and `Content-Range` name it.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Bytes => "bytes",
            Unit::Rows => "rows",
        }
    }
}

/// One range, as it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// What it counts.
    pub unit: Unit,
    bounds: Bounds,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bounds {
    From { first: u64, last: Option<u64> },
    Last(u64),
}

impl Asked {
    /// The range in the value of a header; `None` for what may be ignored, and then the whole is meant: other units,
    /// several ranges, and what is no range.
    pub fn parse(value: &str) -> Option<Asked> {
        let (unit, bounds) = value.split_once('=')?;
        let unit =
            [Unit::Bytes, Unit::Rows].into_iter().find(|known| known.name().eq_ignore_ascii_case(unit.trim()))?;
        let (first, last) = bounds.trim().split_once('-')?;
        let bounds = match (first, last) {
            ("", last) => Bounds::Last(number(last)?),
            (first, "") => Bounds::From { first: number(first)?, last: None },
            (first, last) => Bounds::From { first: number(first)?, last: Some(number(last)?) },
        };
        let is_backwards = matches!(bounds, Bounds::From { first, last: Some(last) } if last < first);
        (!is_backwards).then_some(Asked { unit, bounds })
    }

    /// What it comes to where there are `total`; `None` where none of it is there.
    pub fn of(self, total: u64) -> Option<Range<u64>> {
        let range = match self.bounds {
            Bounds::From { first, last } => first..last.map_or(total, |last| last.saturating_add(1).min(total)),
            Bounds::Last(count) => total.saturating_sub(count)..total,
        };
        (!range.is_empty()).then_some(range)
    }
}

/// Digits alone: `parse` would take a sign.
fn number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(value: &str, total: u64) -> Option<Range<u64>> {
        Asked::parse(value).expect("a range").of(total)
    }

    #[test]
    fn ranges_are_those_of_rfc_9110() {
        assert_eq!(of("bytes=0-499", 10_000), Some(0..500));
        assert_eq!(of("bytes=500-999", 600), Some(500..600));
        assert_eq!(of("bytes=-500", 10_000), Some(9500..10_000));
        assert_eq!(of("bytes=-500", 100), Some(0..100));
        assert_eq!(of("Bytes=9500-", 10_000), Some(9500..10_000));
        assert_eq!(of("rows=2-4", 10), Some(2..5));
        assert_eq!(of("rows=0-18446744073709551615", 10), Some(0..10));
        assert_eq!(Asked::parse("rows=2-4").unwrap().unit, Unit::Rows);
        for unsatisfiable in ["bytes=100-", "bytes=100-200", "bytes=-0"] {
            assert_eq!(of(unsatisfiable, 100), None, "{unsatisfiable}");
        }
        assert_eq!(of("rows=0-0", 0), None);
    }

    #[test]
    fn what_is_no_single_range_is_ignored() {
        let ignored = ["", "bytes", "bytes=", "bytes=-", "bytes=1-0", "bytes=0-1,3-4", "bytes=+1-2", "bytes=a-b"];
        let more = ["lines=0-1", "bytes=0-18446744073709551616", "bytes 0-1", "bytes=1--2"];
        for value in ignored.into_iter().chain(more) {
            assert_eq!(Asked::parse(value), None, "{value}");
        }
    }

    proptest! {
        #[test]
        fn a_range_lies_within_what_there_is(value in "(rows|bytes)=[0-9]{0,20}-[0-9]{0,20}", total: u64) {
            if let Some(range) = Asked::parse(&value).and_then(|asked| asked.of(total)) {
                prop_assert!(range.start < range.end && range.end <= total);
            }
        }
    }
}
