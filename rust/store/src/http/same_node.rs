//! Whether two processes run on one node.
//!
//! A client that could read memory of the owner says on which node it runs: by the number that the kernel draws when it
//! boots. Where that is the owner's own, references are sent instead of bytes. They open nothing by themselves: the
//! kernel lets only processes of the same user attach, and tells by the segment's own number that it is the one. Who
//! cannot attach, being in another container perhaps, asks for the bytes, and from then on for nothing else.

use std::fs;
use std::sync::LazyLock;

/// The header of a request that names the node of the client, if it can attach memory of that node.
pub(super) const NODE_FIELD: &str = "tundish-node";

static NODE: LazyLock<Option<String>> = LazyLock::new(|| {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned()).filter(|id| !id.is_empty())
});

/// This node; `None` where nothing tells.
pub(super) fn this() -> Option<&'static str> {
    NODE.as_deref()
}

/// Whether it is this one.
pub(super) fn is_this(node: &str) -> bool {
    this() == Some(node)
}
