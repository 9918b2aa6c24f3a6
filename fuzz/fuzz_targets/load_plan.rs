//! Reads plan folders made of arbitrary bytes: what `PackPlan.load`, a look-up and `verify` do with them.
//!
//! The first byte chooses one of the good plans. The rest is cut at the marker `\n--\n` into plan.json and
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
use reading::{requests, use_folder};

const MARKER: &[u8] = b"\n--\n";

/// The files of a plan folder: name and bytes, plan.json first.
type PlanFiles = Vec<(String, Vec<u8>)>;

/// The files of each good plan.
fn good() -> &'static [PlanFiles] {
    static GOOD: OnceLock<Vec<PlanFiles>> = OnceLock::new();
    GOOD.get_or_init(|| {
        let files = |request| {
            let parent = tempfile::tempdir().expect("a temporary folder");
            let target = parent.path().join("plan");
            Packer::new(request, &mut NoProgress)
                .and_then(|plan| plan.write(&target, &mut NoProgress))
                .expect("a plan");
            let columns = Field::ALL.iter().map(|&field| folder::file_name(field));
            let names = [folder::METADATA_FILE.to_owned()].into_iter().chain(columns);
            names.filter_map(|name| fs::read(target.join(&name)).ok().map(|bytes| (name, bytes))).collect()
        };
        requests().into_iter().map(files).collect()
    })
}

fuzz_target!(|data: &[u8]| {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let Some((&first, mut rest)) = data.split_first() else { return };
    let plan = &good()[usize::from(first) % good().len()];
    let mut parts = Vec::new();
    while let Some(at) = rest.windows(MARKER.len()).position(|window| window == MARKER) {
        parts.push(&rest[..at]);
        rest = &rest[at + MARKER.len()..];
    }
    parts.push(rest);
    for (number, (name, good)) in plan.iter().enumerate() {
        let bytes = match parts.get(number) {
            Some(part) if !part.is_empty() => part,
            _ => &good[..],
        };
        fs::write(parent.path().join(name), bytes).expect("a write");
    }
    let _ = use_folder(parent.path());
});
