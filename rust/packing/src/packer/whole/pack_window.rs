//! The packs that were opened last, and which of them takes an item.

use crate::request::LARGEST_WINDOW_TOKENS;
use crate::simd::vectorized;

/// How much room each of the packs has that were opened last. A place that holds no pack yet has none.
///
/// The packs lie in a ring of slots: a new pack takes the slot of the oldest.
pub(super) struct PackWindow {
    /// The room of each pack, the oldest first, and in the low bits its place here. So one search for the least key
    /// finds the least room, and of several packs the oldest.
    keys: Vec<u32>,
    /// How many low bits of a key are the place.
    place_bits: u32,
    max_length: u32,
    /// The slot of the oldest pack.
    oldest: usize,
}

/// Where an item goes.
pub(super) struct Placed {
    pub(super) slot: usize,
    /// Whether the pack is a new one, for which the oldest has to leave the slot.
    pub(super) is_new: bool,
    /// Where in the window the pack is, from 0 for the oldest.
    pub(super) place: usize,
}

impl PackWindow {
    pub(super) fn new(window: u64, max_length: u64) -> Self {
        debug_assert!(window.next_power_of_two() * max_length < LARGEST_WINDOW_TOKENS);
        let place_bits = window.next_power_of_two().trailing_zeros();
        Self { keys: (0..window as u32).collect(), place_bits, max_length: max_length as u32, oldest: 0 }
    }

    /// Take room for `size` tokens, which is no more than `max_length` and not 0: of the pack with the least room that
    /// suffices, the oldest of several, or of a new pack.
    #[inline(always)]
    pub(super) fn place(&mut self, size: u32) -> Placed {
        let size = size << self.place_bits;
        // A pack with too little room wraps around to above `i32::MAX`, where no key is.
        let left = vectorized(|| self.keys.iter().fold(u32::MAX, |least, key| least.min(key.wrapping_sub(size))));
        self.take(size, Some(left).filter(|&left| left <= i32::MAX as u32))
    }

    /// As `place`, of the packs in slots where `fits` is true, or of a new pack.
    pub(super) fn place_where(&mut self, size: u32, fits: impl Fn(usize) -> bool) -> Placed {
        let size = size << self.place_bits;
        let keys = self.keys.iter().enumerate().filter(|&(place, &key)| key >= size && fits(self.slot(place)));
        let left = keys.map(|(_, key)| key - size).min();
        self.take(size, left)
    }

    /// Take `size`, shifted as in a key, from the pack whose key is then `left`, or from a new one.
    #[inline(always)]
    fn take(&mut self, size: u32, left: Option<u32>) -> Placed {
        if let Some(left) = left {
            let place = (left & ((1 << self.place_bits) - 1)) as usize;
            self.keys[place] = left;
            return Placed { slot: self.slot(place), is_new: false, place };
        }
        let (slot, place) = (self.oldest, self.keys.len() - 1);
        self.oldest = if slot == place { 0 } else { slot + 1 };
        self.keys.copy_within(1.., 0);
        self.keys.iter_mut().for_each(|key| *key = key.wrapping_sub(1));
        self.keys[place] = (self.max_length << self.place_bits | place as u32) - size;
        Placed { slot, is_new: true, place }
    }

    #[inline(always)]
    fn slot(&self, place: usize) -> usize {
        let slot = self.oldest + place;
        if slot < self.keys.len() { slot } else { slot - self.keys.len() }
    }

    /// Have packs with so many tokens of room each, the oldest first, in a window that has none.
    pub(super) fn reopen(&mut self, free: &[u64]) {
        let first = self.keys.len() - free.len();
        for ((place, key), &room) in self.keys.iter_mut().enumerate().skip(first).zip(free) {
            *key = (room as u32) << self.place_bits | place as u32;
        }
    }

    /// Let nothing more into the pack that took the last item.
    pub(super) fn fill_up(&mut self, placed: &Placed) {
        self.keys[placed.place] = placed.place as u32;
    }

    /// All slots, that of the oldest pack first.
    pub(super) fn slots(&self) -> impl Iterator<Item = usize> + use<> {
        let (window, oldest) = (self.keys.len(), self.oldest);
        (oldest..window).chain(0..oldest)
    }
}
