//! Builds an object from the words of a traversal, its leaves and its values.
//!
//! Invariants:
//!
//! 1. A program is checked once, when it is compiled: each instruction finds the parts that it takes on the stack.
//! 2. Python code may run while an object is built. A container is complete before such code can see it.

use std::collections::HashSet;
use std::vec::Drain;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple, PyType};
use pyo3::{PyTraverseError, PyVisit};

use super::traversal::{AGAIN, DICT, LEAF, LIST, NODE, NONE, NUMBER_SHIFT, PICKLED, TUPLE, TUPLE_OF, VALUE, WHOLE};
use crate::error::BindingError;

/// Tokens of builders that bring a leaf to host memory; see `tundish.tree.array_rules`.
const HOST_BUILDERS: [&str; 1] = ["array"];

/// The compiled words and tokens of an object.
#[pyclass(frozen)]
pub(crate) struct RebuildProgram {
    instructions: Box<[Instruction]>,
    leaves: usize,
    values: usize,
    pickles: usize,
    host_only: HashSet<usize>,
    has_references: bool,
}

enum Instruction {
    Leaf(usize),
    None,
    Value,
    /// A value that is a container.
    Whole,
    Pickled,
    Again(usize),
    /// Builds a container from so many of the last parts.
    Build(usize, Builder),
}

enum Builder {
    List,
    Tuple,
    /// `tuple.__new__` and the class to call it with.
    TupleOf(Py<PyAny>, Py<PyType>),
    Dict(Py<PyTuple>),
    /// The token for the builder in Python.
    Node(Py<PyTuple>),
}

#[pymethods]
impl RebuildProgram {
    /// Compile the words and tokens that `traverse` returned. Raises `ValueError` where they are damaged.
    #[new]
    fn new(words: &[u8], tokens: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let (words, rest) = words.as_chunks();
        if !rest.is_empty() {
            return Err(damaged("it ends within a word"));
        }
        let mut compiler = Compiler { tokens, instructions: Vec::new(), height: 0, built: 0, has_references: false };
        let mut words = words.iter().map(|word| u32::from_ne_bytes(*word));
        while let Some(word) = words.next() {
            compiler.add(word, &mut words).map_err(|error| {
                if error.is_instance_of::<PyValueError>(tokens.py()) { error } else { damaged(&error.to_string()) }
            })?;
        }
        if compiler.height != 1 {
            return Err(damaged("it does not end with one object"));
        }
        let instructions: Box<[Instruction]> = compiler.instructions.into();
        let count =
            |kind: fn(&Instruction) -> bool| instructions.iter().filter(|instruction| kind(instruction)).count();
        Ok(RebuildProgram {
            leaves: instructions
                .iter()
                .map(|instruction| if let Instruction::Leaf(number) = instruction { number + 1 } else { 0 })
                .max()
                .unwrap_or(0),
            values: count(|instruction| matches!(instruction, Instruction::Value | Instruction::Whole)),
            pickles: count(|instruction| matches!(instruction, Instruction::Pickled)),
            host_only: host_only(&instructions, tokens.py())?,
            has_references: compiler.has_references,
            instructions,
        })
    }

    /// The number of pickled objects that `build` takes.
    #[getter]
    fn pickles(&self) -> usize {
        self.pickles
    }

    /// Numbers of the leaves that are needed in host memory only.
    #[getter]
    fn host_only_leaves(&self) -> HashSet<usize> {
        self.host_only.clone()
    }

    /// A class may hold the program that builds its instances.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.instructions.iter().try_for_each(|instruction| match instruction {
            Instruction::Build(_, Builder::TupleOf(_, class)) => visit.call(class),
            Instruction::Build(_, Builder::Dict(tuple) | Builder::Node(tuple)) => visit.call(tuple),
            _ => Ok(()),
        })
    }

    /// Build the object. `builder(token, parts)` builds what is no list, dict or tuple.
    ///
    /// Raises `ValueError` where there are too few leaves, values or pickled objects.
    fn build<'py>(
        &self,
        leaves: &Bound<'py, PyList>,
        values: &Bound<'py, PyList>,
        pickled: &Bound<'py, PyList>,
        builder: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = leaves.py();
        if leaves.len() < self.leaves || values.len() < self.values || pickled.len() < self.pickles {
            return Err(damaged(&format!("it takes {} leaves and {} values", self.leaves, self.values)));
        }
        let (mut values, mut pickled) = (values.iter(), pickled.iter());
        let missing = || damaged("values vanished");
        let mut stack: Vec<Bound<'py, PyAny>> = Vec::with_capacity(self.leaves + self.values + 1);
        let mut built: Vec<Bound<'py, PyAny>> = Vec::new();
        for instruction in &self.instructions {
            let object = match instruction {
                Instruction::Leaf(number) => leaves.get_item(*number)?,
                Instruction::None => py.None().into_bound(py),
                Instruction::Value | Instruction::Whole => values.next().ok_or_else(missing)?,
                Instruction::Pickled => pickled.next().ok_or_else(missing)?,
                Instruction::Again(number) => built[*number].clone(),
                Instruction::Build(count, kind) => {
                    let first = stack.len() - count;
                    kind.build(py, stack.drain(first..), builder)?
                }
            };
            if self.has_references && matches!(instruction, Instruction::Whole | Instruction::Build(..)) {
                built.push(object.clone());
            }
            stack.push(object);
        }
        stack.pop().ok_or_else(missing)
    }
}

impl Builder {
    fn build<'py>(
        &self,
        py: Python<'py>,
        parts: Drain<'_, Bound<'py, PyAny>>,
        builder: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        Ok(match self {
            Builder::List => PyList::new(py, parts)?.into_any(),
            Builder::Tuple => PyTuple::new(py, parts)?.into_any(),
            Builder::TupleOf(new, class) => new.bind(py).call1((class.bind(py), PyTuple::new(py, parts)?))?,
            Builder::Dict(keys) => {
                let dict = PyDict::new(py);
                for (key, part) in keys.bind(py).iter_borrowed().zip(parts) {
                    dict.set_item(key, part)?;
                }
                dict.into_any()
            }
            Builder::Node(token) => builder.call1((token.bind(py), PyList::new(py, parts)?))?,
        })
    }
}

struct Compiler<'a, 'py> {
    tokens: &'a Bound<'py, PyTuple>,
    instructions: Vec<Instruction>,
    /// The number of objects on the stack, and of containers that are built.
    height: usize,
    built: usize,
    has_references: bool,
}

impl Compiler<'_, '_> {
    /// Add the instruction of a word; `more` are the words after it.
    fn add(&mut self, word: u32, more: &mut impl Iterator<Item = u32>) -> PyResult<()> {
        let number = (word >> NUMBER_SHIFT) as usize;
        let mut index = || more.next().map(|index| index as usize).ok_or_else(|| damaged("it ends within a container"));
        let instruction = match word & ((1 << NUMBER_SHIFT) - 1) {
            LEAF => Instruction::Leaf(number),
            VALUE => Instruction::Value,
            NONE => Instruction::None,
            WHOLE => Instruction::Whole,
            PICKLED => Instruction::Pickled,
            AGAIN if number < self.built => {
                self.has_references = true;
                Instruction::Again(number)
            }
            LIST => Instruction::Build(number, Builder::List),
            TUPLE => Instruction::Build(number, Builder::Tuple),
            DICT => {
                let first = index()?;
                let keys = self.tokens.get_slice(first, first.saturating_add(number));
                if keys.len() != number {
                    return Err(damaged("a dict has other keys than parts"));
                }
                Instruction::Build(number, Builder::Dict(keys.unbind()))
            }
            TUPLE_OF => {
                let class = self.tokens.get_item(index()?)?.cast_into::<PyType>()?.unbind();
                Instruction::Build(number, Builder::TupleOf(self.tokens.get_type().getattr("__new__")?.unbind(), class))
            }
            NODE => Instruction::Build(
                number,
                Builder::Node(self.tokens.get_item(index()?)?.cast_into::<PyTuple>()?.unbind()),
            ),
            _ => return Err(damaged("a word is unknown")),
        };
        if let Instruction::Build(count, _) = instruction {
            self.height = self.height.checked_sub(count).ok_or_else(|| damaged("a container lacks parts"))?;
        }
        if let Instruction::Build(..) | Instruction::Whole = instruction {
            self.built += 1;
        }
        self.height += 1;
        self.instructions.push(instruction);
        Ok(())
    }
}

/// The leaves that only builders of host memory take.
fn host_only(instructions: &[Instruction], py: Python<'_>) -> PyResult<HashSet<usize>> {
    let (mut on_host, mut others) = (HashSet::new(), HashSet::new());
    for (at, instruction) in instructions.iter().enumerate() {
        let Instruction::Leaf(number) = instruction else { continue };
        let is_host = match instructions.get(at + 1) {
            Some(Instruction::Build(1, Builder::Node(token))) => {
                let name = token.bind(py).get_item(0)?;
                name.cast::<PyString>().is_ok_and(|name| HOST_BUILDERS.iter().any(|host| name == host))
            }
            _ => false,
        };
        if is_host {
            on_host.insert(*number)
        } else {
            others.insert(*number)
        };
    }
    Ok(on_host.difference(&others).copied().collect())
}

fn damaged(reason: &str) -> PyErr {
    BindingError::Value(format!("the program of a schema is damaged: {reason}")).into()
}
