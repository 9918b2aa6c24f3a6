//! Reads plan folders made of arbitrary bytes: what `PackPlan.load`, a look-up and `verify` do with them.
//!
//! The first byte chooses a plan of six or of eight columns. The rest is cut at the marker `\n--\n` into plan.json and
//! the columns, in the order of `Field::ALL`; parts that are missing are taken from a good plan, so that mutations of one
//! file get past the checks of the others.
#![no_main]
#![expect(clippy::disallowed_methods, reason = "the target writes damaged files on purpose")]

use std::fs;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use tundish_packing::{Field, NoProgress, Packer, folder};

#[path = "../../rust/packing/tests/reading/mod.rs"]
mod reading;
use reading::{request, split_request, use_folder};

const MARKER: &[u8] = b"\n--\n";

fn names(is_split: bool) -> Vec<String> {
    let columns = Field::of_plan(is_split).iter().map(|&field| folder::file_name(field));
    [folder::METADATA_FILE.to_owned()].into_iter().chain(columns).collect()
}

/// The bytes of each file of a good plan.
fn good(is_split: bool) -> &'static [Vec<u8>] {
    static GOOD: [OnceLock<Vec<Vec<u8>>>; 2] = [OnceLock::new(), OnceLock::new()];
    GOOD[usize::from(is_split)].get_or_init(|| {
        let request = if is_split { split_request() } else { request() };
        let parent = tempfile::tempdir().expect("a temporary folder");
        let target = parent.path().join("plan");
        Packer::new(request, &mut NoProgress).and_then(|plan| plan.write(&target, &mut NoProgress)).expect("a plan");
        names(is_split).iter().map(|name| fs::read(target.join(name)).expect("a file")).collect()
    })
}

fuzz_target!(|data: &[u8]| {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let Some((&first, mut rest)) = data.split_first() else { return };
    let is_split = first % 2 == 1;
    let mut parts = Vec::new();
    while let Some(at) = rest.windows(MARKER.len()).position(|window| window == MARKER) {
        parts.push(&rest[..at]);
        rest = &rest[at + MARKER.len()..];
    }
    parts.push(rest);
    for (number, (name, good)) in names(is_split).iter().zip(good(is_split)).enumerate() {
        let bytes = match parts.get(number) {
            Some(part) if !part.is_empty() => part,
            _ => &good[..],
        };
        fs::write(parent.path().join(name), bytes).expect("a write");
    }
    let _ = use_folder(parent.path());
});
