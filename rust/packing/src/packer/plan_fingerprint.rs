//! The fingerprint of a plan: a hash of all arguments and inputs that determine it.

use super::{Packer, scan};
use crate::error::PackError;
use crate::fingerprint::{Fingerprint, ParameterHash};
use crate::inputs::SampleOrder;
use crate::plan::{FORMAT_VERSION, MIXED};
use crate::progress::Progress;
use crate::request::{Mode, Modes, PackMultiple, PackRequest, WholeOptions};

/// The fingerprint of the plan that a request asks for.
///
/// # Errors
/// As `Packer::new`. The order is only hashed, not checked, except where it may name samples that are refused.
pub fn plan_fingerprint(request: PackRequest<'_>, progress: &mut dyn Progress) -> Result<Fingerprint, PackError> {
    Packer::new(request, progress)?.with_order_hashed(progress)
}

/// As `plan_fingerprint`, but samples that are too long or cost too much are not refused.
pub(crate) fn unchecked_fingerprint(
    request: PackRequest<'_>,
    progress: &mut dyn Progress,
) -> Result<Fingerprint, PackError> {
    Packer::scanned(request, progress)?.with_order_hashed(progress)
}

impl Packer<'_> {
    fn with_order_hashed(&self, progress: &mut dyn Progress) -> Result<Fingerprint, PackError> {
        let order_digest = match self.request.order {
            SampleOrder::Given(order) => scan::hash_column(&order, &self.threads, progress)?,
            _ => 0,
        };
        Ok(self.fingerprint(order_digest))
    }

    /// The fingerprint of the plan; `order_digest` is the hash of an order that was given.
    pub(super) fn fingerprint(&self, order_digest: u128) -> Fingerprint {
        let mut hash = ParameterHash::new("tundish plan");
        hash.push("format_version", &FORMAT_VERSION.to_le_bytes());
        match &self.request.mode {
            Modes::All(mode) => {
                hash.push("mode", mode.name().as_bytes());
                hash.push("max_length", &self.request.max_length.to_le_bytes());
                push_options(&mut hash, *mode);
            }
            Modes::Each(modes) => {
                hash.push("mode", MIXED.as_bytes());
                hash.push("max_length", &self.request.max_length.to_le_bytes());
                for mode in modes {
                    hash.push("mode", mode.name().as_bytes());
                    push_options(&mut hash, *mode);
                }
            }
        }
        if let Some(costs) = &self.costs {
            costs.push_to(&mut hash);
        }
        if let Some(PackMultiple { of, remainder }) = self.request.multiple {
            hash.push("multiple_of", &of.to_le_bytes());
            hash.push("remainder", remainder.name().as_bytes());
        }
        hash.push("global_pack", &[u8::from(self.request.global_pack)]);
        match self.request.order {
            SampleOrder::Natural => hash.push("order", b"natural"),
            SampleOrder::Seed(seed) => hash.push("seed", &seed.to_le_bytes()),
            SampleOrder::Given(_) => hash.push("order", &order_digest.to_le_bytes()),
        }
        for scan in &self.scans {
            for (samples, digest) in &scan.parts {
                hash.push("samples", &samples.to_le_bytes());
                hash.push("lengths", &digest.to_le_bytes());
            }
        }
        hash.finish()
    }
}

fn push_options(hash: &mut ParameterHash, mode: Mode) {
    match mode {
        Mode::Hard { drop_last } => hash.push("drop_last", &[u8::from(drop_last)]),
        Mode::Whole(WholeOptions { placement, overlong, max_samples, align }) => {
            hash.push("overlong", overlong.name().as_bytes());
            hash.push("align", &align.to_le_bytes());
            for (name, value) in [("window", placement.window()), ("max_samples", max_samples)] {
                if let Some(value) = value {
                    hash.push(name, &value.to_le_bytes());
                }
            }
        }
    }
}
