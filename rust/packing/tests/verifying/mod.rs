//! A plan with the inputs that it was made from, and the checks that `verify` makes in every mode.

use tundish_packing::ordered_samples::SampleOrder;
use tundish_packing::{Integers, NoProgress, PackError, PackRequest, Packer, Plan, verify};

pub const MAX_LENGTH: u64 = 16;

/// A plan with the lengths and the order that it was made from.
pub struct Case {
    pub plan: Plan,
    pub lengths: Vec<Integers<'static>>,
    pub order: Option<Integers<'static>>,
}

impl Case {
    /// The plan of `request`, whose lengths and order are replaced by these.
    pub fn new(lengths: &[&'static [u64]], order: SampleOrder<'static>, request: &PackRequest<'static>) -> Self {
        let lengths: Vec<Integers<'static>> = lengths.iter().map(|&column| Integers::from(column)).collect();
        let request = PackRequest { lengths: lengths.clone(), order, ..request.clone() };
        let plan = Packer::new(request, &mut NoProgress).and_then(|packer| packer.pack(&mut NoProgress)).unwrap();
        let order = match order {
            SampleOrder::Given(order) => Some(order),
            _ => None,
        };
        Self { plan, lengths, order }
    }

    pub fn verify(&self, plan: &Plan) -> Result<(), PackError> {
        verify::verify(&plan.view(), &plan.metadata, &self.lengths, self.order, None, Some(1), &mut NoProgress)
    }
}
