//! The quick way back: from leaves and values to an object of nothing but Python's own dicts, lists and tuples, and
//! namedtuples.
//!
//! What always holds:
//!
//! 1. A program is looked through once, when it is compiled: what it takes off the stack is there, and what it names
//!    was made before.
//! 2. Code of others may run while an object is made, as the garbage collector comes by: what is there by then is
//!    whole.

use std::ops::Range;
use std::vec::Drain;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyRange, PyRangeMethods, PyString, PyTuple, PyType};
use pyo3::{PyTraverseError, PyVisit};

use crate::error::BindingError;

/// How an object is put together, as `tundish.tree.schema.Structure` has it: compiled.
#[pyclass(frozen)]
pub(crate) struct QuickProgram {
    steps: Box<[Step]>,
    /// How many it takes.
    leaves: usize,
    values: usize,
    /// Whether something is named that was made before.
    names: bool,
}

/// What is put down next.
enum Step {
    Leaf(usize),
    Leaves(Range<usize>),
    None,
    Value,
    Constant(Py<PyAny>),
    /// What was made as number so many.
    Again(usize),
    /// What is made of so many of those that were put down last.
    Make(usize, Kind),
}

enum Kind {
    List,
    Tuple,
    /// What makes tuples of a class, and which one.
    TupleOf(Py<PyAny>, Py<PyType>),
    Dict(Py<PyTuple>),
    /// The one part itself.
    Whole,
}

#[pymethods]
impl QuickProgram {
    /// `program` compiled; None where it makes anything else.
    ///
    /// Raises `ValueError` where it is none.
    #[staticmethod]
    fn of(program: &Bound<'_, PyTuple>) -> PyResult<Option<Self>> {
        let mut compiled = Compiler::default();
        for step in program.iter() {
            match compiled.add(&step) {
                Ok(Some(())) => {}
                Ok(None) => return Ok(None),
                Err(error) if error.is_instance_of::<PyValueError>(program.py()) => return Err(error),
                Err(error) => return Err(wrong(&error.to_string())),
            }
        }
        if compiled.height != 1 {
            return Err(wrong("it ends with one object"));
        }
        let Compiler { steps, leaves, values, names, .. } = compiled;
        Ok(Some(QuickProgram { steps: steps.into(), leaves, values, names }))
    }

    /// A class may hold on to what it was made for.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.held().try_for_each(|held| visit.call(held))
    }

    /// The object of these leaves and values, which has no containers but new ones.
    ///
    /// Raises `ValueError` where they are too few.
    fn build<'py>(&self, leaves: &Bound<'py, PyList>, values: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyAny>> {
        let py = leaves.py();
        if leaves.len() < self.leaves || values.len() < self.values {
            return Err(wrong(&format!("it takes {} leaves and {} values", self.leaves, self.values)));
        }
        let mut values = values.iter();
        let mut stack: Vec<Bound<'py, PyAny>> = Vec::with_capacity(self.leaves + self.values + 1);
        let mut made: Vec<Bound<'py, PyAny>> = Vec::new();
        for step in &self.steps {
            match step {
                Step::Leaf(number) => stack.push(leaves.get_item(*number)?),
                Step::Leaves(numbers) => {
                    for number in numbers.clone() {
                        stack.push(leaves.get_item(number)?);
                    }
                }
                Step::None => stack.push(py.None().into_bound(py)),
                Step::Value => stack.push(values.next().ok_or_else(|| wrong("there are as many values as before"))?),
                Step::Constant(constant) => stack.push(constant.bind(py).clone()),
                Step::Again(number) => stack.push(made[*number].clone()),
                Step::Make(count, kind) => {
                    let first = stack.len() - count;
                    let one = kind.make(py, stack.drain(first..))?;
                    if self.names {
                        made.push(one.clone());
                    }
                    stack.push(one);
                }
            }
        }
        stack.pop().ok_or_else(|| wrong("it ends with one object"))
    }
}

impl QuickProgram {
    /// Whatever it holds on to.
    fn held(&self) -> impl Iterator<Item = &Py<PyAny>> {
        self.steps.iter().filter_map(|step| match step {
            Step::Constant(constant) => Some(constant),
            Step::Make(_, Kind::TupleOf(_, class)) => Some(class.as_any()),
            Step::Make(_, Kind::Dict(keys)) => Some(keys.as_any()),
            _ => None,
        })
    }
}

impl Kind {
    /// One of this kind, of so many parts as it was compiled for.
    fn make<'py>(&self, py: Python<'py>, mut parts: Drain<'_, Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
        Ok(match self {
            Kind::List => PyList::new(py, parts)?.into_any(),
            Kind::Tuple => PyTuple::new(py, parts)?.into_any(),
            // By the function of tuples themselves: no code of the class runs.
            Kind::TupleOf(new, class) => new.bind(py).call1((class.bind(py), PyTuple::new(py, parts)?))?,
            Kind::Dict(keys) => {
                let dict = PyDict::new(py);
                for (key, part) in keys.bind(py).iter_borrowed().zip(parts) {
                    dict.set_item(key, part)?;
                }
                dict.into_any()
            }
            Kind::Whole => parts.next().ok_or_else(|| wrong("of nothing nothing is made"))?,
        })
    }
}

#[derive(Default)]
struct Compiler {
    steps: Vec<Step>,
    leaves: usize,
    values: usize,
    names: bool,
    /// How many lie on the stack by now, and how many were made.
    height: usize,
    made: usize,
}

impl Compiler {
    /// Add a step; nothing where it is not for the quick way.
    fn add(&mut self, step: &Bound<'_, PyAny>) -> PyResult<Option<()>> {
        if let Ok(step) = step.cast_exact::<PyTuple>() {
            return self.add_made(step);
        }
        if step.is_none() {
            self.push(Step::None, 1);
        } else if step.is_exact_instance_of::<PyInt>() {
            let number = step.extract()?;
            self.leaves = self.leaves.max(usize::saturating_add(number, 1));
            self.push(Step::Leaf(number), 1);
        } else if step.is_exact_instance_of::<PyString>() {
            self.values += 1;
            self.push(Step::Value, 1);
        } else if let Ok(range) = step.cast::<PyRange>() {
            let (start, stop) = (range.start()?, range.stop()?);
            let (Ok(start), Ok(stop)) = (usize::try_from(start), usize::try_from(stop)) else {
                return Err(wrong("leaves are counted from 0"));
            };
            self.leaves = self.leaves.max(stop);
            self.push(Step::Leaves(start..stop), stop.saturating_sub(start));
        } else {
            return Ok(None);
        }
        Ok(Some(()))
    }

    /// Add what makes something: how many parts it takes, and what its builder is told.
    fn add_made(&mut self, step: &Bound<'_, PyTuple>) -> PyResult<Option<()>> {
        let (count, token): (usize, Bound<'_, PyTuple>) = step.extract()?;
        let name = token.get_item(0)?;
        // As `tundish.tree.parts` has them.
        let kind = match name.cast::<PyString>()?.to_str()? {
            "constant" => {
                self.push(Step::Constant(token.get_item(1)?.unbind()), 1);
                return Ok(Some(()));
            }
            "again" => {
                let number = token.get_item(1)?.extract()?;
                if number >= self.made {
                    return Err(wrong("what is named again was made before"));
                }
                self.names = true;
                self.push(Step::Again(number), 1);
                return Ok(Some(()));
            }
            "keys" => {
                let keys = token.get_item(1)?.cast_into::<PyTuple>()?;
                if keys.len() != count {
                    return Err(wrong("a dict has as many keys as parts"));
                }
                Kind::Dict(keys.unbind())
            }
            "items of a list" => Kind::List,
            "items of a tuple" => Kind::Tuple,
            "whole" if count == 1 => Kind::Whole,
            // One with a state may have a way of its own to take it.
            "tuple" if !token.get_item(2)?.is_truthy()? => {
                let new = step.get_type().getattr("__new__")?;
                Kind::TupleOf(new.unbind(), token.get_item(1)?.cast_into::<PyType>()?.unbind())
            }
            _ => return Ok(None),
        };
        let Some(height) = self.height.checked_sub(count) else {
            return Err(wrong("a container's parts are there before it"));
        };
        self.height = height;
        self.made += 1;
        self.push(Step::Make(count, kind), 1);
        Ok(Some(()))
    }

    fn push(&mut self, step: Step, put_down: usize) {
        self.steps.push(step);
        self.height = self.height.saturating_add(put_down);
    }
}

fn wrong(what: &str) -> PyErr {
    BindingError::Value(format!("this is no program of a structure: {what}")).into()
}
