//! The arguments of a plan.

use serde::{Deserialize, Serialize};

use crate::error::PackError;
use crate::inputs::{Integers, SampleOrder};

/// The largest `max_length` of the modes that keep samples whole: they count samples by length.
pub const LARGEST_WHOLE_LENGTH: u64 = 1 << 28;
/// The largest `window`: each sample is compared with that many packs.
pub const LARGEST_WINDOW: u64 = 1 << 16;
/// `window`, rounded up to a power of two, times `max_length` is below this: a pack's room and its place in the window
/// are compared as one number of 31 bits.
pub const LARGEST_WINDOW_TOKENS: u64 = 1 << 31;

/// The largest `PackMultiple::of`: so many packs are remembered.
pub const LARGEST_MULTIPLE: u64 = 1 << 20;

/// What to pack, and how.
#[derive(Clone)]
pub struct PackRequest<'a> {
    /// The lengths of each dataset, in tokens.
    pub lengths: Vec<Integers<'a>>,
    /// The order of the samples.
    pub order: SampleOrder<'a>,
    /// Tokens a pack.
    pub max_length: u64,
    /// The algorithm of all datasets, or of each.
    pub mode: Modes,
    /// A second limit of packs.
    pub costs: Option<SampleCosts<'a>>,
    /// Make the number of packs a multiple.
    pub multiple: Option<PackMultiple>,
    /// Pack all datasets as one: sample indices count through, and packs span datasets.
    pub global_pack: bool,
    /// Threads to compute on at most.
    pub threads: usize,
}

/// What samples cost beside their tokens, and what a pack may cost.
#[derive(Clone)]
pub struct SampleCosts<'a> {
    /// The cost of each sample, one column a dataset; an empty one for a dataset of mode `hard` among others.
    pub columns: Vec<Integers<'a>>,
    /// What the samples of a pack cost together at most.
    pub max_cost: u64,
}

/// A number that divides the number of packs of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackMultiple {
    /// The number.
    pub of: u64,
    /// How the packs become a multiple of it.
    pub remainder: Remainder,
}

/// How the number of packs becomes a multiple.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Remainder {
    /// The emptiest packs are left out.
    Drop,
    /// The first packs come again at the end.
    Repeat,
}

/// An algorithm with its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The samples are one stream of tokens, cut every `max_length` tokens.
    Hard {
        /// Leave out the tail that is shorter than a pack, instead of making it a shorter last pack.
        drop_last: bool,
    },
    /// Samples are kept whole.
    Whole(WholeOptions),
}

/// The algorithm of all datasets, or of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Modes {
    /// All datasets have one mode.
    All(Mode),
    /// Each dataset has its own; packs do not span datasets, and each is packed as it would be alone.
    Each(Vec<Mode>),
}

/// How samples that are kept whole are placed in packs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Best-fit decreasing over all samples of a dataset.
    BestFit,
    /// In order, each into the fullest pack that has room, of those that were opened last.
    Ordered {
        /// Packs that are open at once.
        window: u64,
    },
    /// In order; a pack is closed when the next sample does not fit.
    Sequential,
}

/// What happens to samples longer than `max_length`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Overlong {
    /// They are refused.
    Error,
    /// They are cut into parts of `max_length` and a rest, which are packed like samples.
    Split,
    /// Their first `max_length` tokens are packed.
    Truncate,
    /// They are left out.
    Drop,
}

/// Options of the modes that keep samples whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WholeOptions {
    /// How samples are placed.
    pub placement: Placement,
    /// What happens to samples longer than `max_length`.
    pub overlong: Overlong,
    /// Pieces a pack at most.
    pub max_samples: Option<u64>,
    /// Each piece takes a multiple of so many tokens of its pack.
    pub align: u64,
}

impl Overlong {
    /// The name, as in `plan.json`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Split => "split",
            Self::Truncate => "truncate",
            Self::Drop => "drop",
        }
    }

    /// The choice of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Error, Self::Split, Self::Truncate, Self::Drop].into_iter().find(|choice| choice.name() == name)
    }
}

impl SampleCosts<'_> {
    /// Check the limit and the numbers of costs; an error is a clause that says what is wrong.
    fn check(&self, modes: &Modes, lengths: &[Integers<'_>]) -> Result<(), String> {
        let is_split = |mode: &Mode| matches!(mode, Mode::Whole(WholeOptions { overlong: Overlong::Split, .. }));
        if modes.all().iter().any(is_split) {
            return Err("costs are of whole samples, and overlong=\"split\" cuts samples: pass \
                        overlong=\"truncate\" or overlong=\"drop\", or leave costs out"
                .into());
        }
        if modes.all().iter().all(|mode| matches!(mode, Mode::Hard { .. })) {
            return Err("mode \"hard\" takes no costs".into());
        }
        if self.max_cost > i64::MAX as u64 {
            return Err(format!("max_cost is {}; it must be below 2^63", self.max_cost));
        }
        if self.columns.len() != lengths.len() {
            return Err(format!("costs are of {} datasets, and lengths of {}", self.columns.len(), lengths.len()));
        }
        for (dataset, (costs, lengths)) in self.columns.iter().zip(lengths).enumerate() {
            let expected = if matches!(modes.of(dataset), Mode::Hard { .. }) { 0 } else { lengths.len() };
            if costs.len() != expected {
                return Err(format!(
                    "dataset {dataset} has {} costs, not {expected}; give one a sample, and none in mode \"hard\"",
                    costs.len()
                ));
            }
        }
        Ok(())
    }
}

impl From<Mode> for Modes {
    fn from(mode: Mode) -> Self {
        Self::All(mode)
    }
}

impl Modes {
    /// The mode of a dataset, which exists.
    #[must_use]
    pub fn of(&self, dataset: usize) -> Mode {
        match self {
            Self::All(mode) => *mode,
            Self::Each(modes) => modes[dataset],
        }
    }

    /// All modes, the same one once or more.
    pub(crate) fn all(&self) -> &[Mode] {
        match self {
            Self::All(mode) => std::slice::from_ref(mode),
            Self::Each(modes) => modes,
        }
    }

    /// Whether plans of these modes have `piece_start` and `piece_stop`.
    pub(crate) fn have_piece_ranges(&self) -> bool {
        self.all().iter().any(|mode| mode.has_piece_ranges())
    }
}

impl Remainder {
    /// The name, as in `plan.json`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Drop => "drop",
            Self::Repeat => "repeat",
        }
    }

    /// The choice of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Drop, Self::Repeat].into_iter().find(|choice| choice.name() == name)
    }
}

impl PackMultiple {
    /// Check the number for a plan of these modes; an error is a clause that says what is wrong.
    pub(crate) fn check(self, modes: &Modes) -> Result<(), String> {
        if self.of == 0 || self.of > LARGEST_MULTIPLE {
            return Err(format!("multiple_of is {}; it must be 1 to {LARGEST_MULTIPLE} packs", self.of));
        }
        if self.remainder == Remainder::Drop && modes.all().contains(&Mode::Hard { drop_last: false }) {
            return Err("drop_last=False keeps the tails, and remainder=\"drop\" would leave them out again: pass \
                        remainder=\"repeat\", or leave drop_last out"
                .into());
        }
        Ok(())
    }
}

impl Mode {
    /// The name, as in `plan.json`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hard { .. } => "hard",
            Self::Whole(WholeOptions { placement: Placement::BestFit, .. }) => "best_fit",
            Self::Whole(WholeOptions { placement: Placement::Ordered { .. }, .. }) => "ordered",
            Self::Whole(WholeOptions { placement: Placement::Sequential, .. }) => "sequential",
        }
    }

    /// Whether plans of this mode have `piece_start` and `piece_stop`.
    #[must_use]
    pub fn has_piece_ranges(self) -> bool {
        matches!(self, Self::Whole(options) if matches!(options.overlong, Overlong::Split | Overlong::Truncate))
    }

    /// Check the options against each other and `max_length`; an error is a clause that says what is wrong.
    pub(crate) fn check(self, max_length: u64) -> Result<(), String> {
        if max_length == 0 || max_length > i64::MAX as u64 {
            return Err(format!("max_length is {max_length}; it must be at least 1 token and below 2^63"));
        }
        match self {
            Self::Hard { .. } => Ok(()),
            Self::Whole(options) => options.check(max_length),
        }
    }
}

impl Placement {
    /// Packs that are open at once; none where all of them are.
    #[must_use]
    pub fn window(self) -> Option<u64> {
        match self {
            Self::BestFit => None,
            Self::Ordered { window } => Some(window),
            Self::Sequential => Some(1),
        }
    }

    /// The placement of the mode of this name.
    #[must_use]
    pub fn from_name(name: &str, window: u64) -> Option<Self> {
        match name {
            "best_fit" => Some(Self::BestFit),
            "ordered" => Some(Self::Ordered { window }),
            "sequential" => Some(Self::Sequential),
            _ => None,
        }
    }
}

impl WholeOptions {
    /// Pieces a pack at most.
    pub(crate) fn most_pieces(&self) -> u64 {
        self.max_samples.unwrap_or(u64::MAX)
    }

    /// What a piece takes of its pack.
    #[inline(always)]
    pub(crate) fn aligned(&self, tokens: u64) -> u64 {
        if self.align == 1 { tokens } else { tokens.next_multiple_of(self.align) }
    }

    fn check(&self, max_length: u64) -> Result<(), String> {
        if max_length > LARGEST_WHOLE_LENGTH {
            return Err(format!(
                "max_length is {max_length}; the modes of whole samples count them by length, up to 2^28 \
                 ({LARGEST_WHOLE_LENGTH}) tokens: pass at most that, or mode=\"hard\""
            ));
        }
        if self.align == 0 || !max_length.is_multiple_of(self.align) {
            return Err(format!(
                "align is {} and max_length is {max_length}; max_length must be a multiple of align",
                self.align
            ));
        }
        if self.max_samples == Some(0) {
            return Err("max_samples is 0; a pack holds at least 1 sample".into());
        }
        match self.placement.window() {
            Some(window) if window == 0 || window > LARGEST_WINDOW => {
                Err(format!("window is {window}; it must be 1 to {LARGEST_WINDOW} packs"))
            }
            Some(window) if window.next_power_of_two() * max_length >= LARGEST_WINDOW_TOKENS => Err(format!(
                "window is {window} and max_length is {max_length}; the window, rounded up to a power of two, times \
                 max_length must be below 2^31 ({LARGEST_WINDOW_TOKENS}): take a smaller window"
            )),
            _ => Ok(()),
        }
    }
}

impl PackRequest<'_> {
    /// Refuse arguments that contradict each other, before any length is read.
    pub(crate) fn check(&self) -> Result<(), PackError> {
        match &self.mode {
            Modes::Each(modes) if modes.len() != self.lengths.len() || self.global_pack => {
                return Err(PackError::Invalid("there is one mode for each dataset, and no global_pack=True".into()));
            }
            _ => {}
        }
        let check = |mode: &Mode| mode.check(self.max_length);
        self.mode.all().iter().try_for_each(check).map_err(PackError::Invalid)?;
        if let Some(costs) = &self.costs {
            costs.check(&self.mode, &self.lengths).map_err(PackError::Invalid)?;
        }
        if let Some(multiple) = self.multiple {
            multiple.check(&self.mode).map_err(PackError::Invalid)?;
        }
        if let SampleOrder::Given(order) = self.order {
            let [lengths] = self.lengths[..] else {
                return Err(PackError::Invalid("order can be given for a single dataset only".into()));
            };
            if order.len() > lengths.len() {
                return Err(PackError::Invalid(format!(
                    "order has {} entries for {} samples; each sample may be used at most once",
                    order.len(),
                    lengths.len()
                )));
            }
        }
        Ok(())
    }
}
