//! The quick walk: through an object of nothing but Python's own dicts, lists, tuples and values, and tensors.
//!
//! What always holds:
//!
//! 1. Nothing changes while it goes on: it keeps the GIL, calls nothing that is written in Python, and makes no object
//!    that the garbage collector follows before it has a reference to all that it found.
//! 2. A deep object takes no more of the stack than a flat one.
//! 3. Whatever is not of exactly these types ends it with nothing found, and so does a container that contains itself.
//!
//! What it found is said in words of 32 bits, in the order of the programs in `tundish.tree.schema`: the lowest four
//! are one of the constants here, the others a number. `tundish.tree.quick` reads them.

use pyo3::PyTypeInfo;
use pyo3::ffi::PyTypeObject;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyInt, PyList, PySet, PyString, PyTuple, PyType};
use rustc_hash::FxHashMap;

/// The next leaf.
const LEAF: u32 = 0;
/// So many leaves in a row, which are all that a container has.
const ROW: u32 = 1;
/// The next value.
const VALUE: u32 = 2;
const NONE: u32 = 3;
/// A list or tuple that is one value.
const WHOLE: u32 = 4;
/// The container that was made as number so many.
const AGAIN: u32 = 5;
/// Containers, by the number of their parts.
const LIST: u32 = 6;
const TUPLE: u32 = 7;
/// Followed by a word: where its keys begin.
const KEYS: u32 = 8;
/// A tuple of a class of its own. Followed by a word: where that is among the keys.
const TUPLE_OF: u32 = 9;

const SHIFT: u32 = 4;
const MOST: usize = 1 << (u32::BITS - SHIFT);

/// As `tundish.tree.walking` has them: so long a list of values is one value; from so many parts on they may be a row.
const LONG: usize = 16;
const SEVERAL: usize = 4;

/// In place of a number, of a container whose parts are being walked through; there is no word for it.
const OPEN: u32 = u32::MAX;

/// Words, keys, leaves and values.
type Found<'py> = (Bound<'py, PyBytes>, Bound<'py, PyTuple>, Bound<'py, PyList>, Bound<'py, PyList>);

/// Walk through `root`, whose leaves are of exactly the type `tensor`; `tuples`: subclasses of `tuple` that are nothing
/// more than their items. None: it is not for the quick walk.
#[pyfunction]
pub(crate) fn quick_walk<'py>(
    root: &Bound<'py, PyAny>,
    tensor: &Bound<'py, PyType>,
    tuples: &Bound<'py, PySet>,
) -> PyResult<Option<Found<'py>>> {
    let py = root.py();
    let mut walk = Walk::new(tensor, tuples, root.clone());
    if walk.through()?.is_none() {
        return Ok(None);
    }
    let words: Vec<_> = walk.words.into_iter().map(u32::to_ne_bytes).collect();
    Ok(Some((
        PyBytes::new(py, words.as_flattened()),
        PyTuple::new(py, walk.keys)?,
        PyList::new(py, walk.leaves)?,
        PyList::new(py, walk.values)?,
    )))
}

struct Walk<'a, 'py> {
    kinds: Kinds,
    tuples: &'a Bound<'py, PySet>,
    words: Vec<u32>,
    keys: Vec<Bound<'py, PyAny>>,
    leaves: Vec<Bound<'py, PyAny>>,
    values: Vec<Bound<'py, PyAny>>,
    /// Of all containers that are being walked through, those of the innermost last.
    parts: Vec<Bound<'py, PyAny>>,
    /// How many containers were made, and the number of each.
    made: u32,
    made_as: FxHashMap<usize, u32>,
}

/// A container that is being walked through: where its parts begin and which is the next, how it is said, and where it
/// is.
struct Frame {
    first: usize,
    next: usize,
    word: u32,
    more: Option<u32>,
    address: usize,
}

impl<'a, 'py> Walk<'a, 'py> {
    fn new(tensor: &Bound<'py, PyType>, tuples: &'a Bound<'py, PySet>, root: Bound<'py, PyAny>) -> Self {
        Walk {
            kinds: Kinds::new(tensor),
            tuples,
            words: Vec::new(),
            keys: Vec::new(),
            leaves: Vec::new(),
            values: Vec::new(),
            parts: vec![root],
            made: 0,
            made_as: FxHashMap::default(),
        }
    }

    /// Nothing where the object is not for this walk.
    fn through(&mut self) -> PyResult<Option<()>> {
        let mut outer: Vec<Frame> = Vec::new();
        let mut frame = Frame { first: 0, next: 0, word: 0, more: None, address: 0 };
        loop {
            let Some(part) = self.parts.get(frame.next) else {
                self.parts.truncate(frame.first);
                let Some(around) = outer.pop() else { return Ok(Some(())) };
                self.make(&frame);
                frame = around;
                continue;
            };
            frame.next += 1;
            let kind = self.kinds.of(part);
            match kind {
                Kind::Tensor => {
                    self.words.push(LEAF);
                    self.leaves.push(part.clone());
                }
                Kind::Value => {
                    self.words.push(VALUE);
                    self.values.push(part.clone());
                }
                Kind::None => self.words.push(NONE),
                _ => {
                    let part = part.clone();
                    let address = part.as_ptr().addr();
                    if let Some(before) = self.made_as.insert(address, OPEN) {
                        let Some(word) = word(AGAIN, before as usize) else { return Ok(None) };
                        self.made_as.insert(address, before);
                        self.words.push(word);
                        continue;
                    }
                    let Some(inner) = self.enter(part, &kind)? else { return Ok(None) };
                    if let Some(inner) = inner {
                        outer.push(std::mem::replace(&mut frame, inner));
                    }
                }
            }
        }
    }

    /// A container of which nothing was seen before, its parts put where they are walked through; `Some(None)`: it is
    /// done.
    #[expect(clippy::option_option, reason = "not for this walk, or nothing left to walk through")]
    fn enter(&mut self, container: Bound<'py, PyAny>, kind: &Kind) -> PyResult<Option<Option<Frame>>> {
        let address = container.as_ptr().addr();
        let first = self.parts.len();
        let mut more = None;
        let what = match kind {
            Kind::Dict => {
                more = Some(self.keys.len());
                for (key, value) in container.cast::<PyDict>()?.iter() {
                    if !self.kinds.is_key(&key) {
                        return Ok(None);
                    }
                    self.keys.push(key);
                    self.parts.push(value);
                }
                KEYS
            }
            Kind::List => {
                let list = container.cast::<PyList>()?;
                if list.len() >= LONG && list.iter().all(|item| self.kinds.of(&item) == Kind::Value) {
                    self.add_whole(container);
                    return Ok(Some(None));
                }
                self.parts.extend(list.iter());
                LIST
            }
            Kind::Tuple => {
                let tuple = container.cast::<PyTuple>()?;
                if tuple.len() >= LONG && tuple.iter_borrowed().all(|item| self.kinds.of(&item) == Kind::Value) {
                    self.add_whole(container);
                    return Ok(Some(None));
                }
                self.parts.extend(tuple.iter());
                TUPLE
            }
            _ => {
                let class = container.get_type();
                // With another metaclass, to look for it could call what that has.
                if class.get_type_ptr() != self.kinds.class || !self.tuples.contains(&class)? {
                    return Ok(None);
                }
                more = Some(self.keys.len());
                self.parts.extend(container.cast::<PyTuple>()?.iter());
                self.keys.push(class.into_any());
                TUPLE_OF
            }
        };
        let parts = &self.parts[first..];
        if self.made as usize >= MOST {
            return Ok(None);
        }
        let (Some(word), Ok(more)) = (word(what, parts.len()), more.map(u32::try_from).transpose()) else {
            return Ok(None);
        };
        let frame = Frame { first, next: first, word, more, address };
        if parts.len() >= SEVERAL && parts.iter().all(|part| part.get_type_ptr() == self.kinds.tensor) {
            self.words.push(ROW | word >> SHIFT << SHIFT);
            self.leaves.extend(self.parts.drain(first..));
            self.make(&frame);
            return Ok(Some(None));
        }
        Ok(Some(Some(frame)))
    }

    fn add_whole(&mut self, container: Bound<'py, PyAny>) {
        let frame = Frame { first: 0, next: 0, word: WHOLE, more: None, address: container.as_ptr().addr() };
        self.values.push(container);
        self.words.push(VALUE);
        self.make(&frame);
    }

    /// All parts of a container were said.
    fn make(&mut self, frame: &Frame) {
        self.words.push(frame.word);
        self.words.extend(frame.more);
        self.made_as.insert(frame.address, self.made);
        self.made += 1;
    }
}

/// None: for so large a number there is no word.
fn word(what: u32, number: usize) -> Option<u32> {
    (number < MOST).then_some(what | (number as u32) << SHIFT)
}

#[derive(PartialEq, Eq)]
enum Kind {
    Tensor,
    Value,
    None,
    Dict,
    List,
    Tuple,
    Other,
}

/// The types that are told apart, to be compared with an object's own.
struct Kinds {
    tensor: *mut PyTypeObject,
    text: *mut PyTypeObject,
    integer: *mut PyTypeObject,
    other_values: [*mut PyTypeObject; 4],
    dict: *mut PyTypeObject,
    list: *mut PyTypeObject,
    tuple: *mut PyTypeObject,
    class: *mut PyTypeObject,
}

impl Kinds {
    fn new(tensor: &Bound<'_, PyType>) -> Self {
        let py = tensor.py();
        Kinds {
            tensor: tensor.as_type_ptr(),
            text: PyString::type_object_raw(py),
            integer: PyInt::type_object_raw(py),
            other_values: [
                PyFloat::type_object_raw(py),
                PyBool::type_object_raw(py),
                PyBytes::type_object_raw(py),
                PyComplex::type_object_raw(py),
            ],
            dict: PyDict::type_object_raw(py),
            list: PyList::type_object_raw(py),
            tuple: PyTuple::type_object_raw(py),
            class: PyType::type_object_raw(py),
        }
    }

    fn of(&self, object: &Bound<'_, PyAny>) -> Kind {
        let kind = object.get_type_ptr();
        if kind == self.tensor {
            Kind::Tensor
        } else if kind == self.dict {
            Kind::Dict
        } else if kind == self.list {
            Kind::List
        } else if kind == self.text || kind == self.integer || self.other_values.contains(&kind) {
            Kind::Value
        } else if kind == self.tuple {
            Kind::Tuple
        } else if object.is_none() {
            Kind::None
        } else {
            Kind::Other
        }
    }

    /// Whether a key stands in the structure, as equal ones of this type are the same.
    fn is_key(&self, key: &Bound<'_, PyAny>) -> bool {
        let kind = key.get_type_ptr();
        kind == self.text || kind == self.integer
    }
}
