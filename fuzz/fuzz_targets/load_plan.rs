//! Reads plan folders made of arbitrary bytes: what `PackPlan.load`, a look-up and `verify` do with them.
//!
//! The input is cut at the marker `\n--\n` into plan.json and the six columns, in the order of
//! `Field::ALL`; parts that are missing are taken from a good plan, so that mutations of one file get past the
//! checks of the others.
#![no_main]
#![expect(clippy::disallowed_methods, reason = "the target writes damaged files on purpose")]

use std::fs;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use tundish_packing::hard::HardPacker;
use tundish_packing::{Field, NoProgress, folder};

#[path = "../../rust/packing/tests/reading/mod.rs"]
mod reading;
use reading::{request, use_folder};

const MARKER: &[u8] = b"\n--\n";

fn names() -> Vec<String> {
    [folder::METADATA_FILE.to_owned()].into_iter().chain(Field::ALL.map(folder::file_name)).collect()
}

/// The bytes of each file of a good plan.
fn good() -> &'static [Vec<u8>] {
    static GOOD: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    GOOD.get_or_init(|| {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let target = parent.path().join("plan");
        HardPacker::new(request(), &mut NoProgress)
            .and_then(|plan| plan.write(&target, &mut NoProgress))
            .expect("a plan");
        names().iter().map(|name| fs::read(target.join(name)).expect("a file")).collect()
    })
}

fuzz_target!(|data: &[u8]| {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let mut parts = Vec::new();
    let mut rest = data;
    while let Some(at) = rest.windows(MARKER.len()).position(|window| window == MARKER) {
        parts.push(&rest[..at]);
        rest = &rest[at + MARKER.len()..];
    }
    parts.push(rest);
    for (number, (name, good)) in names().iter().zip(good()).enumerate() {
        let bytes = match parts.get(number) {
            Some(part) if !part.is_empty() => part,
            _ => &good[..],
        };
        fs::write(parent.path().join(name), bytes).expect("a write");
    }
    let _ = use_folder(parent.path());
});
