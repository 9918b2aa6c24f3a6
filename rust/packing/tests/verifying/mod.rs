//! A plan with the inputs that it was made from, and the checks that `verify` makes in every mode.

use tundish_packing::inputs::SampleOrder;
use tundish_packing::plan::Column;
use tundish_packing::{Integers, Mode, NoProgress, PackError, PackRequest, Packer, Plan, verify};

const MAX_LENGTH: u64 = 16;

/// A plan with the lengths and the order that it was made from.
pub struct Case {
    pub plan: Plan,
    pub lengths: Vec<Integers<'static>>,
    pub order: Option<Integers<'static>>,
}

impl Case {
    pub fn new(lengths: &[&'static [u64]], order: SampleOrder<'static>, mode: Mode, global_pack: bool) -> Self {
        let lengths: Vec<Integers<'static>> = lengths.iter().map(|&column| Integers::from(column)).collect();
        let request = PackRequest {
            lengths: lengths.clone(),
            order,
            max_length: MAX_LENGTH,
            mode: mode.into(),
            costs: None,
            multiple: None,
            global_pack,
            threads: 1,
        };
        let plan = Packer::new(request, &mut NoProgress).and_then(|packer| packer.pack(&mut NoProgress)).unwrap();
        let order = match order {
            SampleOrder::Given(order) => Some(order),
            _ => None,
        };
        Self { plan, lengths, order }
    }

    pub fn verify(&self, plan: &Plan) -> Result<(), PackError> {
        verify::verify(&plan.view(), &plan.metadata, &self.lengths, self.order, None, 1, &mut NoProgress)
    }

    /// Each entry of each column, when it is one more or one less.
    pub fn assert_changed_values_are_found(&self) {
        for field in 0..self.plan.columns.len() {
            for entry in 0..self.plan.columns[field].len() {
                for change in [-1, 1] {
                    let mut broken = self.plan.clone();
                    let Column::I32(values) = &mut broken.columns[field] else { panic!("values fit 32 bits") };
                    values[entry] += change;
                    let found = self.verify(&broken);
                    let mode = &self.plan.metadata.mode;
                    assert!(matches!(found, Err(PackError::Mismatch(_))), "{mode} {field} {entry}: {found:?}");
                }
            }
        }
    }

    /// Each column, when it is wider than its values need.
    pub fn assert_other_widths_are_found(&self) {
        for &field in self.plan.view().fields() {
            let mut broken = self.plan.clone();
            broken.columns[field as usize] = Column::I64(self.plan.column(field).to_i64());
            match self.verify(&broken) {
                Err(PackError::Mismatch(text)) => assert!(text.starts_with(field.name()), "{text}"),
                found => panic!("{}: {found:?}", field.name()),
            }
        }
    }
}
