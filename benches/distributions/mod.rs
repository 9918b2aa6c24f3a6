//! Inputs of the benches: lengths of text and of chat samples, and random orders.

use tundish_packing::NoProgress;
use tundish_packing::shuffle::RandomState;

/// A distribution of sample lengths, lognormal, in tokens, clipped to 1 … 32768.
#[derive(Clone, Copy, Debug)]
pub enum Lengths {
    /// Median 600, sigma 1.2.
    Text,
    /// Median 150, sigma 1.0.
    Chat,
}

impl Lengths {
    /// `samples` lengths, always the same ones.
    pub fn draw(self, samples: usize) -> Vec<i64> {
        let (median, sigma) = match self {
            Self::Text => (600f64, 1.2),
            Self::Chat => (150.0, 1.0),
        };
        let mut random = RandomState::new(1);
        let mut uniform = || (f64::from(random.next_u32()) + 0.5) / 4_294_967_296.0;
        (0..samples)
            .map(|_| {
                // Box and Muller's transform.
                let normal = (-2.0 * uniform().ln()).sqrt() * (core::f64::consts::TAU * uniform()).cos();
                ((median.ln() + sigma * normal).exp() as i64).clamp(1, 32768)
            })
            .collect()
    }
}

/// A random order of `samples` samples, always the same one.
pub fn permutation(samples: usize) -> Vec<i64> {
    RandomState::new(2).shuffled(samples, &mut NoProgress).expect("memory for an order")
}
