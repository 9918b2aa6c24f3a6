//! The arguments of a plan, and the one check of them.

use core::fmt::Display;
use core::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::error::PackError;
use crate::integers::Integers;
use crate::ordered_samples::SampleOrder;

/// The largest `max_length` of the modes that keep samples whole: they count samples by length.
const LARGEST_WHOLE_LENGTH: u64 = 1 << 28;
/// The window of "ordered" where none is given.
const DEFAULT_WINDOW: u64 = 64;
/// The largest `window`: each sample is compared with that many packs.
const LARGEST_WINDOW: u64 = 1 << 16;
/// `window`, rounded up to a power of two, times `max_length` is below this: a pack's room and its place in the window
/// are compared as one number of 31 bits.
pub(crate) const LARGEST_WINDOW_TOKENS: u64 = 1 << 31;
/// The largest `multiple_of`: so many packs are remembered.
const LARGEST_MULTIPLE: u64 = 1 << 20;
/// A larger number of threads is a typing error: no machine has as many processors.
const MOST_THREADS: u64 = 512;

/// An enum of the words that an option may be.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $word)] $variant,)*
        }

        impl $name {
            /// All words.
            pub const WORDS: &[&str] = &[$($word),*];

            /// The word, as in `plan.json`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }

            /// The choice of this word.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($word => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

words! {
    /// The algorithm of a plan.
    Mode {
        /// The samples are one stream of tokens, cut every `max_length` tokens.
        Hard = "hard",
        /// Whole samples: best-fit decreasing over all samples of a dataset.
        BestFit = "best_fit",
        /// Whole samples, in order, each into the fullest pack that has room, of those that were opened last.
        Ordered = "ordered",
        /// Whole samples, in order; a pack is closed when the next sample does not fit.
        Sequential = "sequential",
    }
}

words! {
    /// What happens to samples longer than `max_length`.
    Overlong {
        /// They are refused.
        Error = "error",
        /// They are cut into parts of `max_length` and a rest, which are packed like samples.
        Split = "split",
        /// Their first `max_length` tokens are packed.
        Truncate = "truncate",
        /// They are left out.
        Drop = "drop",
    }
}

words! {
    /// How the number of packs becomes a multiple.
    Remainder {
        /// The last packs of the largest dataset are left out.
        Drop = "drop",
        /// The first packs come again at the end.
        Repeat = "repeat",
    }
}

/// What to pack, and how. An option that is `None` was not given.
#[derive(Clone, Debug)]
pub struct PackRequest<'a> {
    /// The lengths of each dataset, in tokens.
    pub lengths: Vec<Integers<'a>>,
    /// Tokens a pack.
    pub max_length: u64,
    /// The algorithm.
    pub mode: Mode,
    /// The order of the samples.
    pub order: SampleOrder<'a>,
    /// Of "hard": leave out the tail that is shorter than a pack, instead of making it a shorter last pack.
    pub drop_last: Option<bool>,
    /// Of whole samples: what happens to those longer than `max_length`.
    pub overlong: Option<Overlong>,
    /// Of "ordered": packs that are open at once.
    pub window: Option<u64>,
    /// Of whole samples: pieces a pack at most.
    pub max_samples: Option<u64>,
    /// Of whole samples: each piece takes a multiple of so many tokens of its pack.
    pub align: u64,
    /// Of whole samples: the cost of each sample, one column a dataset.
    pub costs: Option<Vec<Integers<'a>>>,
    /// What the samples of a pack cost together at most.
    pub max_cost: Option<u64>,
    /// A number that divides the number of packs.
    pub multiple_of: Option<u64>,
    /// How the packs become a multiple of it.
    pub remainder: Option<Remainder>,
    /// Pack all datasets as one: sample indices count through, and packs span datasets.
    pub global_pack: bool,
    /// Threads to compute on at most; as many as there are processors where it is not given.
    pub threads: Option<u64>,
}

/// The options of a mode, checked and complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    Hard { drop_last: bool },
    Whole(WholeOptions),
}

/// The options of the modes that keep samples whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WholeOptions {
    /// Packs that are open at once; none where all of them are.
    pub(crate) window: Option<u64>,
    pub(crate) overlong: Overlong,
    pub(crate) max_samples: Option<u64>,
    pub(crate) align: u64,
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
}

impl<'a> PackRequest<'a> {
    /// Hard packing of these lengths, with no option given.
    #[must_use]
    pub fn new(lengths: Vec<Integers<'a>>, max_length: u64) -> Self {
        Self {
            lengths,
            max_length,
            mode: Mode::Hard,
            order: SampleOrder::Natural,
            drop_last: None,
            overlong: None,
            window: None,
            max_samples: None,
            align: 1,
            costs: None,
            max_cost: None,
            multiple_of: None,
            remainder: None,
            global_pack: false,
            threads: None,
        }
    }

    /// Check all arguments against their ranges and each other, before any length is read. An option that the mode does
    /// not use is refused, never ignored.
    ///
    /// # Errors
    /// `Invalid` with what is wrong, and what to do.
    pub(crate) fn check(&self) -> Result<Packing, PackError> {
        self.checked().map_err(PackError::Invalid)
    }

    fn checked(&self) -> Result<Packing, String> {
        let given = [
            ("max_length", Some(self.max_length)),
            ("align", Some(self.align)),
            ("window", self.window),
            ("max_samples", self.max_samples),
            ("max_cost", self.max_cost),
            ("multiple_of", self.multiple_of),
            ("threads", self.threads),
        ];
        for (name, value) in given {
            if let Some(value) = value.filter(|value| !range_of(name, self.mode).contains(value)) {
                return Err(out_of_range(name, value, self.mode));
            }
        }
        let packing = if self.mode == Mode::Hard { self.checked_hard()? } else { self.checked_whole()? };
        self.check_remainder()?;
        self.check_order()?;
        Ok(packing)
    }

    fn checked_hard(&self) -> Result<Packing, String> {
        let given = [
            ("overlong", self.overlong.is_some()),
            ("max_samples", self.max_samples.is_some()),
            ("align", self.align != 1),
            ("costs", self.costs.is_some()),
        ];
        if let Some((name, _)) = given.iter().find(|(_, is_given)| *is_given) {
            return Err(format!(
                "mode 'hard' takes no {name}: it cuts samples of any length where a pack is full. Leave {name} out, or \
                 choose mode='best_fit', 'ordered' or 'sequential', which pack whole samples"
            ));
        }
        self.check_window()?;
        self.check_costs()?;
        Ok(Packing::Hard { drop_last: self.drop_last.unwrap_or(true) })
    }

    fn checked_whole(&self) -> Result<Packing, String> {
        let (mode, max_length, align) = (self.mode.name(), self.max_length, self.align);
        if self.drop_last.is_some() {
            return Err(format!(
                "mode '{mode}' takes no drop_last: it packs whole samples, and no tail is left over. Leave drop_last \
                 out, or choose mode='hard'"
            ));
        }
        self.check_window()?;
        if !max_length.is_multiple_of(align) {
            let below = max_length / align * align;
            let fitting: Vec<String> = [below, below + align]
                .iter()
                .filter(|&&length| length > 0 && length <= LARGEST_WHOLE_LENGTH)
                .map(u64::to_string)
                .collect();
            return Err(format!(
                "max_length is {max_length}, which is no multiple of align={align}: choose {}, or another align",
                fitting.join(" or ")
            ));
        }
        let window = match self.mode {
            Mode::Ordered => Some(self.window.unwrap_or(DEFAULT_WINDOW)),
            Mode::Sequential => Some(1),
            _ => None,
        };
        if let Some(window) = window.filter(|window| window.next_power_of_two() * max_length >= LARGEST_WINDOW_TOKENS) {
            return Err(format!(
                "window is {window} and max_length is {max_length}; the window, rounded up to a power of two, times \
                 max_length must be below 2^31 ({LARGEST_WINDOW_TOKENS}): take a smaller window"
            ));
        }
        self.check_costs()?;
        let overlong = self.overlong.unwrap_or(Overlong::Error);
        Ok(Packing::Whole(WholeOptions { window, overlong, max_samples: self.max_samples, align }))
    }

    fn check_window(&self) -> Result<(), String> {
        if self.window.is_some() && self.mode != Mode::Ordered {
            return Err(format!(
                "mode '{}' takes no window: only mode='ordered' keeps a window of open packs. Leave window out, or \
                 choose mode='ordered'",
                self.mode.name()
            ));
        }
        Ok(())
    }

    fn check_costs(&self) -> Result<(), String> {
        let costs = match (&self.costs, self.max_cost) {
            (None, None) => return Ok(()),
            (Some(costs), Some(_)) => costs,
            (given, _) => {
                let (given, missing) = if given.is_some() { ("costs", "max_cost") } else { ("max_cost", "costs") };
                return Err(format!(
                    "{given} is given, and {missing} is not: a pack is limited by the costs of its samples and by what \
                     they may cost together"
                ));
            }
        };
        if self.overlong == Some(Overlong::Split) {
            return Err("costs are of whole samples, and overlong='split' cuts samples into parts whose costs are \
                        unknown: choose overlong='truncate' or 'drop', or leave costs and max_cost out"
                .into());
        }
        if costs.len() != self.lengths.len() {
            return Err(format!("costs are of {} datasets, and lengths of {}", costs.len(), self.lengths.len()));
        }
        for (dataset, (costs, lengths)) in costs.iter().zip(&self.lengths).enumerate() {
            if costs.len() != lengths.len() {
                return Err(format!(
                    "dataset {dataset} has {} costs for {} samples: give one cost for each",
                    costs.len(),
                    lengths.len()
                ));
            }
        }
        Ok(())
    }

    fn check_remainder(&self) -> Result<(), String> {
        match (self.multiple_of, self.remainder) {
            (None, Some(remainder)) => Err(format!(
                "remainder is '{}', and there is no multiple_of: give both, or leave remainder out",
                remainder.name()
            )),
            (Some(of), None | Some(Remainder::Drop)) if self.drop_last == Some(false) => Err(format!(
                "multiple_of={of} would discard the tails that drop_last=False keeps: choose remainder='repeat', or \
                 leave drop_last out"
            )),
            _ => Ok(()),
        }
    }

    fn check_order(&self) -> Result<(), String> {
        let SampleOrder::Given(order) = self.order else { return Ok(()) };
        let [lengths] = self.lengths[..] else {
            return Err("order can be given for a single dataset only".into());
        };
        if order.len() > lengths.len() {
            return Err(format!(
                "order has {} entries for {} samples; each sample may be used at most once",
                order.len(),
                lengths.len()
            ));
        }
        Ok(())
    }

    /// How the packs become a multiple, if they do.
    pub(crate) fn multiple(&self) -> Option<(u64, Remainder)> {
        self.multiple_of.map(|of| (of, self.remainder.unwrap_or(Remainder::Drop)))
    }
}

/// The values that an integer option may have in a mode.
#[must_use]
pub fn range_of(name: &str, mode: Mode) -> RangeInclusive<u64> {
    match name {
        "max_length" if mode != Mode::Hard => 1..=LARGEST_WHOLE_LENGTH,
        "align" => 1..=LARGEST_WHOLE_LENGTH,
        "window" => 1..=LARGEST_WINDOW,
        "multiple_of" => 1..=LARGEST_MULTIPLE,
        "threads" => 1..=MOST_THREADS,
        "seed" => 0..=u64::from(u32::MAX),
        "max_cost" => 0..=i64::MAX as u64,
        _ => 1..=i64::MAX as u64,
    }
}

/// The message for an integer option that is out of its range; `value` is what was given.
#[must_use]
pub fn out_of_range(name: &str, value: impl Display, mode: Mode) -> String {
    let range = range_of(name, mode);
    let (least, most) = (range.start(), range.end());
    if name == "max_length" && mode != Mode::Hard {
        return format!(
            "max_length is {value}; in mode '{}' it must be in {least} … {most} (2**28), because the samples of each \
             length are counted. Choose another one, or mode='hard'",
            mode.name()
        );
    }
    format!("{name} is {value}; it must be in {least} … {most}")
}
