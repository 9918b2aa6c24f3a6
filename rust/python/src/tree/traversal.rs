//! Traverses nested containers. Python's rules are called only for objects that are not of the built-in types.
//!
//! The result is a list of words of 32 bits, parts before the container that they belong to. The lowest four bits of a
//! word are one of the constants below, the others a number. [`super::rebuild_program`] builds the object again from
//! them.
//!
//! Invariants:
//!
//! 1. Each object that a rule returned stays alive to the end: containers are told apart by their addresses.
//! 2. A deep object takes no more of the stack than a flat one.
//! 3. No Python code runs while the items of a dict or list are copied.

use pyo3::PyTypeInfo;
use pyo3::ffi::PyTypeObject;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyInt, PyList, PySet, PyString, PyTuple, PyType};
use rustc_hash::FxHashMap;

use crate::error::BindingError;

/// The leaf of this number.
pub(super) const LEAF: u32 = 0;
/// The next value.
pub(super) const VALUE: u32 = 1;
pub(super) const NONE: u32 = 2;
/// The next value, a list or tuple of values.
pub(super) const WHOLE: u32 = 3;
/// The next pickled object.
pub(super) const PICKLED: u32 = 4;
/// The container of this number, which was built before.
pub(super) const AGAIN: u32 = 5;
// Containers with this number of parts.
pub(super) const LIST: u32 = 6;
pub(super) const TUPLE: u32 = 7;
/// A second word is the index of its first key among the tokens.
pub(super) const DICT: u32 = 8;
/// A subclass of `tuple`. A second word is the index of the class among the tokens.
pub(super) const TUPLE_OF: u32 = 9;
/// An object that a rule took apart. A second word is the index of its token among the tokens.
pub(super) const NODE: u32 = 10;

pub(super) const NUMBER_SHIFT: u32 = 4;
const MAX_NUMBER: usize = 1 << (u32::BITS - NUMBER_SHIFT);

/// A list or tuple of at least so many values of built-in types is one value.
const LONG: usize = 16;

/// Stands for the number of a container whose parts are being traversed.
const OPEN: u32 = u32::MAX;

/// Words, tokens and values.
type Found<'py> = (Bound<'py, PyBytes>, Bound<'py, PyTuple>, Bound<'py, PyList>);

/// Traverse `root` and append its leaves to `leaves`.
///
/// Exact dicts, lists, tuples, values and the classes in `plain_tuples` are traversed here. An object of exactly the
/// type `tensor` is a leaf, unless `careful` is set. All other objects, and with `careful` tensors too, go to `rule`,
/// which returns the number of a leaf, an `ObjectParts`, or None if it pickled the object.
///
/// Returns None for a container that contains itself. In that case, and after an error, `path` has an entry for each
/// container that the traversal is in: a key or index, after the class of a plain tuple or the `ObjectParts` of a node.
#[pyfunction]
pub(crate) fn traverse<'py>(
    root: &Bound<'py, PyAny>,
    tensor: &Bound<'py, PyType>,
    plain_tuples: &Bound<'py, PySet>,
    rule: &Bound<'py, PyAny>,
    leaves: &Bound<'py, PyList>,
    path: &Bound<'py, PyList>,
    careful: bool,
) -> PyResult<Option<Found<'py>>> {
    let mut traversal = Traversal {
        kinds: Kinds::new(tensor),
        careful,
        plain_tuples,
        rule,
        leaves,
        words: Vec::new(),
        tokens: Vec::new(),
        values: Vec::new(),
        parts: vec![root.clone()],
        frames: vec![Frame::of_root()],
        built: 0,
        number_at: FxHashMap::default(),
        alive: Vec::new(),
    };
    let completed = traversal.run();
    if !matches!(completed, Ok(true)) {
        for frame in traversal.frames.iter().skip(1) {
            path.append(traversal.path_entry(frame)?)?;
        }
        return completed.map(|_| None);
    }
    let py = root.py();
    let words: Vec<_> = traversal.words.into_iter().map(u32::to_ne_bytes).collect();
    Ok(Some((
        PyBytes::new(py, words.as_flattened()),
        PyTuple::new(py, traversal.tokens)?,
        PyList::new(py, traversal.values)?,
    )))
}

struct Traversal<'a, 'py> {
    kinds: Kinds,
    careful: bool,
    plain_tuples: &'a Bound<'py, PySet>,
    rule: &'a Bound<'py, PyAny>,
    leaves: &'a Bound<'py, PyList>,
    words: Vec<u32>,
    tokens: Vec<Bound<'py, PyAny>>,
    values: Vec<Bound<'py, PyAny>>,
    /// The parts of all open containers, the innermost last.
    parts: Vec<Bound<'py, PyAny>>,
    frames: Vec<Frame<'py>>,
    /// The number of containers that are completed.
    built: u32,
    /// The number of each container, by its address.
    number_at: FxHashMap<usize, u32>,
    alive: Vec<Bound<'py, PyAny>>,
}

/// An open container.
struct Frame<'py> {
    /// The index of its first part, and of the next one to traverse.
    first: usize,
    next: usize,
    word: u32,
    token: Option<u32>,
    address: usize,
    /// The result of the rule that took it apart.
    spec: Option<Bound<'py, PyAny>>,
}

impl Frame<'_> {
    fn of_root() -> Self {
        Frame { first: 0, next: 0, word: 0, token: None, address: 0, spec: None }
    }
}

impl<'py> Traversal<'_, 'py> {
    /// Returns false for a container that contains itself.
    fn run(&mut self) -> PyResult<bool> {
        while let Some(frame) = self.frames.last_mut() {
            let Some(part) = self.parts.get(frame.next) else {
                self.close_frame()?;
                continue;
            };
            frame.next += 1;
            match self.kinds.of(part) {
                Kind::Tensor if !self.careful => {
                    self.words.push(word(LEAF, self.leaves.len())?);
                    self.leaves.append(part)?;
                }
                Kind::Value => {
                    self.words.push(VALUE);
                    self.values.push(part.clone());
                }
                Kind::None => self.words.push(NONE),
                kind => {
                    let part = part.clone();
                    let address = part.as_ptr().addr();
                    match self.number_at.get(&address) {
                        Some(&OPEN) => return Ok(false),
                        Some(&before) => self.words.push(word(AGAIN, before as usize)?),
                        None => self.enter(part, kind)?,
                    }
                }
            }
        }
        Ok(true)
    }

    fn close_frame(&mut self) -> PyResult<()> {
        let Some(frame) = self.frames.pop() else { return Ok(()) };
        self.parts.truncate(frame.first);
        // All but the root's frame.
        if !self.frames.is_empty() {
            self.words.push(frame.word);
            self.words.extend(frame.token);
            self.note_built(frame.address)?;
        }
        Ok(())
    }

    fn note_built(&mut self, address: usize) -> PyResult<()> {
        self.number_at.insert(address, self.built);
        self.built += 1;
        if self.built as usize >= MAX_NUMBER { Err(too_large()) } else { Ok(()) }
    }

    /// Begin an object that was not met before.
    fn enter(&mut self, object: Bound<'py, PyAny>, kind: Kind) -> PyResult<()> {
        let first = self.parts.len();
        match kind {
            Kind::Dict => {
                let keys = self.tokens.len();
                if self.copy_items(object.cast::<PyDict>()?) {
                    return self.open_frame(&object, DICT, first, Some(keys), None);
                }
            }
            Kind::List => {
                let list = object.cast::<PyList>()?;
                if list.len() >= LONG && list.iter().all(|item| self.kinds.of(&item) == Kind::Value) {
                    return self.add_whole(object);
                }
                self.parts.extend(list.iter());
                return self.open_frame(&object, LIST, first, None, None);
            }
            Kind::Tuple => {
                let tuple = object.cast::<PyTuple>()?;
                if tuple.len() >= LONG && tuple.iter_borrowed().all(|item| self.kinds.of(&item) == Kind::Value) {
                    return self.add_whole(object);
                }
                self.parts.extend(tuple.iter());
                return self.open_frame(&object, TUPLE, first, None, None);
            }
            _ => {}
        }
        if self.is_plain_tuple(&object)? {
            return self.enter_plain_tuple(object);
        }
        let answer = self.rule.call1((&object,))?;
        if answer.is_none() {
            self.words.push(PICKLED);
        } else if answer.is_exact_instance_of::<PyInt>() {
            self.words.push(word(LEAF, answer.extract()?)?);
        } else if self.is_plain_tuple(&object)? {
            // The rule has found that just now.
            self.enter_plain_tuple(object)?;
        } else {
            let index = self.tokens.len();
            self.tokens.push(answer.get_item(0)?);
            for part in answer.get_item(1)?.try_iter()? {
                self.parts.push(part?);
            }
            self.alive.push(answer.clone());
            self.open_frame(&object, NODE, first, Some(index), Some(answer))?;
        }
        Ok(())
    }

    /// Copy the items of a dict to `tokens` and `parts`; or nothing, where a key is neither a text nor an integer.
    fn copy_items(&mut self, dict: &Bound<'py, PyDict>) -> bool {
        let (first, keys) = (self.parts.len(), self.tokens.len());
        for (key, value) in dict.iter() {
            if !self.kinds.is_key(&key) {
                self.parts.truncate(first);
                self.tokens.truncate(keys);
                return false;
            }
            self.tokens.push(key);
            self.parts.push(value);
        }
        true
    }

    fn is_plain_tuple(&self, object: &Bound<'py, PyAny>) -> PyResult<bool> {
        let class = object.get_type();
        // A lookup of a class with another metaclass could call code of that metaclass.
        Ok(class.get_type_ptr() == self.kinds.class && self.plain_tuples.contains(&class)?)
    }

    fn enter_plain_tuple(&mut self, object: Bound<'py, PyAny>) -> PyResult<()> {
        let (first, class) = (self.parts.len(), self.tokens.len());
        self.parts.extend(object.cast::<PyTuple>()?.iter());
        self.tokens.push(object.get_type().into_any());
        self.open_frame(&object, TUPLE_OF, first, Some(class), None)
    }

    fn open_frame(
        &mut self,
        object: &Bound<'py, PyAny>,
        what: u32,
        first: usize,
        token: Option<usize>,
        spec: Option<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        let word = word(what, self.parts.len() - first)?;
        let token = token.map(u32::try_from).transpose().map_err(|_| too_large())?;
        let address = object.as_ptr().addr();
        self.number_at.insert(address, OPEN);
        self.frames.push(Frame { first, next: first, word, token, address, spec });
        Ok(())
    }

    fn add_whole(&mut self, container: Bound<'py, PyAny>) -> PyResult<()> {
        self.words.push(WHOLE);
        self.note_built(container.as_ptr().addr())?;
        self.values.push(container);
        Ok(())
    }

    fn path_entry(&self, frame: &Frame<'py>) -> PyResult<(Option<Bound<'py, PyAny>>, Bound<'py, PyAny>)> {
        let at = (frame.next - 1).saturating_sub(frame.first);
        let index = at.into_pyobject(self.rule.py())?.into_any();
        let token = frame.token.map(|token| token as usize);
        Ok(match (frame.word & ((1 << NUMBER_SHIFT) - 1), token) {
            (DICT, Some(keys)) => (None, self.tokens[keys + at].clone()),
            (TUPLE_OF, Some(class)) => (Some(self.tokens[class].clone()), index),
            _ => (frame.spec.clone(), index),
        })
    }
}

fn word(what: u32, number: usize) -> PyResult<u32> {
    if number < MAX_NUMBER { Ok(what | (number as u32) << NUMBER_SHIFT) } else { Err(too_large()) }
}

fn too_large() -> PyErr {
    BindingError::Value(format!("an object of {MAX_NUMBER} parts or more cannot be flattened")).into()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Tensor,
    Value,
    None,
    Dict,
    List,
    Tuple,
    Other,
}

/// The types that are told apart.
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

    /// Whether equal keys of this type are the same: 1 and True are not.
    fn is_key(&self, key: &Bound<'_, PyAny>) -> bool {
        let kind = key.get_type_ptr();
        kind == self.text || kind == self.integer
    }
}
