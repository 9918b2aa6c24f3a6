//! A disk in memory that remembers every change, so that its power can be cut after any of them.
//!
//! Files and folders are numbered; number 0 is the folder [`ROOT`]. `nodes` is what programs see; `before` is what was
//! on the disk when the log begins, with everything that is made later in it already, empty and under no name.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::io::Errno;
use tundish_commit::CommitError;
use tundish_commit::disk::{Disk, EntryKind, FileStat, LockMode, LockOutcome, Room};

pub const ROOT: &str = "/model/root";

type Number = usize;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    File(Vec<u8>),
    Folder(BTreeMap<OsString, Number>),
    Link(OsString),
}

/// Shared until they change: disks are copied by the ten thousand.
pub type Nodes = Vec<Arc<Node>>;

/// A change, or the wish to make some durable.
#[derive(Debug, Clone)]
pub enum Change {
    /// Names that change in one step: of a folder, to lead there or nowhere.
    Names(Vec<(Number, OsString, Option<Number>)>),
    Write(Number, usize, Vec<u8>),
    Length(Number, usize),
    SyncFile(Number),
    SyncFolder(Number),
}

impl Change {
    /// The change as text, without numbers.
    pub fn describe(&self) -> String {
        let without_numbers = |name: &OsStr| {
            let name: String = name.to_string_lossy().chars().filter(|letter| !letter.is_ascii_digit()).collect();
            name.replace("hf", "KIND").replace("dcp", "KIND")
        };
        match self {
            Change::Names(changes) => {
                let verb = |to: &Option<Number>| if to.is_some() { "+" } else { "-" };
                let names = changes.iter().map(|(_, name, to)| format!("{}{}", verb(to), without_numbers(name)));
                names.collect::<Vec<_>>().join(" ")
            }
            Change::Write(..) => "write".into(),
            Change::Length(..) => "length".into(),
            Change::SyncFile(_) => "sync file".into(),
            Change::SyncFolder(0) => "sync root".into(),
            Change::SyncFolder(_) => "sync folder".into(),
        }
    }

    pub fn is_sync(&self) -> bool {
        matches!(self, Change::SyncFile(_) | Change::SyncFolder(_))
    }
}

#[derive(Debug, Clone)]
pub struct World {
    pub nodes: Nodes,
    pub before: Nodes,
    /// Changes since then.
    pub made: Range<usize>,
    pub log: Vec<Change>,
    /// Whether no file may grow and no link be made, until a file with something in it goes.
    pub is_full: bool,
}

#[derive(Debug, Clone)]
pub struct ModelDisk(Arc<Mutex<World>>);

impl World {
    /// A disk that holds these nodes, all of them durable.
    pub fn new(nodes: Nodes) -> Self {
        Self { before: nodes.clone(), made: nodes.len()..nodes.len(), nodes, log: Vec::new(), is_full: false }
    }

    /// A disk that went through the first `length` changes of this one, and still has power.
    pub fn at(&self, length: usize) -> Self {
        let log = self.log[..length].to_vec();
        let mut nodes = self.before.clone();
        log.iter().for_each(|change| apply(&mut nodes, change));
        Self { nodes, before: self.before.clone(), made: self.made.clone(), log, is_full: false }
    }

    fn make(&mut self, folder: Number, name: &OsStr, node: Node) -> Number {
        let node = Arc::new(node);
        self.nodes.push(Arc::clone(&node));
        self.before.push(node);
        let number = self.nodes.len() - 1;
        self.made.end = self.nodes.len();
        self.change(Change::Names(vec![(folder, name.to_owned(), Some(number))]));
        number
    }

    fn change(&mut self, change: Change) {
        apply(&mut self.nodes, &change);
        self.log.push(change);
    }

    fn names(&self, folder: Number) -> &BTreeMap<OsString, Number> {
        match &*self.nodes[folder] {
            Node::Folder(names) => names,
            other => panic!("{other:?} is no folder"),
        }
    }

    fn bytes(&self, file: Number) -> &[u8] {
        match &*self.nodes[file] {
            Node::File(bytes) => bytes,
            other => panic!("{other:?} is no file"),
        }
    }

    fn find(&self, folder: Number, name: &OsStr) -> Result<Number, Errno> {
        self.names(folder).get(name).copied().ok_or(Errno::NOENT)
    }

    fn stat(&self, number: Number) -> FileStat {
        let (kind, size) = match &*self.nodes[number] {
            Node::File(bytes) => (EntryKind::File, bytes.len() as u64),
            Node::Folder(_) => (EntryKind::Folder, 0),
            Node::Link(target) => (EntryKind::Link, target.len() as u64),
        };
        FileStat { kind, device: 1, inode: number as u64, size, taken: size, user: 0, is_marked: false }
    }
}

/// Makes a change to nodes.
pub fn apply(nodes: &mut [Arc<Node>], change: &Change) {
    match change {
        Change::Names(changes) => {
            for (folder, name, to) in changes {
                let Node::Folder(names) = Arc::make_mut(&mut nodes[*folder]) else { panic!("names are in folders") };
                match to {
                    Some(number) => names.insert(name.clone(), *number),
                    None => names.remove(name),
                };
            }
        }
        Change::Write(file, offset, written) => {
            let Node::File(bytes) = Arc::make_mut(&mut nodes[*file]) else { panic!("bytes are in files") };
            let end = offset + written.len();
            bytes.resize(bytes.len().max(end), 0);
            bytes[*offset..end].copy_from_slice(written);
        }
        Change::Length(file, length) => {
            let Node::File(bytes) = Arc::make_mut(&mut nodes[*file]) else { panic!("bytes are in files") };
            bytes.resize(*length, 0);
        }
        Change::SyncFile(_) | Change::SyncFolder(_) => {}
    }
}

impl ModelDisk {
    pub fn new(world: World) -> Self {
        Self(Arc::new(Mutex::new(world)))
    }

    /// The current contents of the disk.
    pub fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    /// How many changes there were.
    pub fn length(&self) -> usize {
        self.world().log.len()
    }

    fn call<T>(&self, path: &Path, work: impl FnOnce(&mut World) -> Result<T, Errno>) -> Result<T, CommitError> {
        work(&mut self.world()).map_err(|errno| CommitError::Io {
            operation: "use the model at",
            path: path.to_path_buf(),
            source: errno.into(),
        })
    }
}

fn open(world: &World, folder: Number, name: &OsStr) -> Result<Number, Errno> {
    let number = world.find(folder, name)?;
    match *world.nodes[number] {
        Node::File(_) => Ok(number),
        Node::Folder(_) => Err(Errno::ISDIR),
        Node::Link(_) => Err(Errno::LOOP),
    }
}

impl Disk for ModelDisk {
    type Folder = Number;
    type File = Number;

    fn open_path(&self, path: &Path) -> Result<Number, CommitError> {
        if path == Path::new(ROOT) {
            return Ok(0);
        }
        let mut numbers = vec![0];
        let inner = path.strip_prefix(ROOT).expect("nothing outside the root is touched");
        for part in inner {
            if part == ".." {
                numbers.pop();
            } else {
                numbers.push(self.open_folder(numbers.last().unwrap(), part, path)?);
            }
        }
        Ok(*numbers.last().expect("nothing outside the root is touched"))
    }

    fn open_folder(&self, parent: &Number, name: &OsStr, path: &Path) -> Result<Number, CommitError> {
        self.call(path, |world| {
            let number = world.find(*parent, name)?;
            match *world.nodes[number] {
                Node::Folder(_) => Ok(number),
                Node::File(_) => Err(Errno::NOTDIR),
                Node::Link(_) => Err(Errno::LOOP),
            }
        })
    }

    fn open_file(&self, folder: &Number, name: &OsStr, path: &Path) -> Result<Number, CommitError> {
        self.call(path, |world| open(world, *folder, name))
    }

    fn open_file_for_writing(&self, folder: &Number, name: &OsStr, path: &Path) -> Result<Number, CommitError> {
        self.open_file(folder, name, path)
    }

    fn open_file_for_direct_writing(
        &self,
        _folder: &Number,
        _name: &OsStr,
        _path: &Path,
    ) -> Result<Option<Number>, CommitError> {
        Ok(None)
    }

    fn open_or_create_file(&self, folder: &Number, name: &OsStr, path: &Path) -> Result<Number, CommitError> {
        self.call(path, |world| match open(world, *folder, name) {
            Err(Errno::NOENT) => Ok(world.make(*folder, name, Node::File(Vec::new()))),
            outcome => outcome,
        })
    }

    fn list(&self, folder: &Number, path: &Path) -> Result<Vec<OsString>, CommitError> {
        self.call(path, |world| Ok(world.names(*folder).keys().cloned().collect()))
    }

    fn look_at(&self, folder: &Number, name: &OsStr, path: &Path) -> Result<Option<FileStat>, CommitError> {
        self.call(path, |world| Ok(world.find(*folder, name).ok().map(|number| world.stat(number))))
    }

    fn folder_stat(&self, folder: &Number, path: &Path) -> Result<FileStat, CommitError> {
        self.call(path, |world| Ok(world.stat(*folder)))
    }

    fn file_stat(&self, file: &Number, path: &Path) -> Result<FileStat, CommitError> {
        self.call(path, |world| Ok(world.stat(*file)))
    }

    fn read(&self, file: &Number, path: &Path) -> Result<Vec<u8>, CommitError> {
        self.call(path, |world| Ok(world.bytes(*file).to_vec()))
    }

    fn read_at(&self, file: &Number, offset: u64, buffer: &mut [u8], path: &Path) -> Result<usize, CommitError> {
        self.call(path, |world| {
            let bytes = world.bytes(*file);
            let start = usize::try_from(offset).unwrap().min(bytes.len());
            let count = buffer.len().min(bytes.len() - start);
            buffer[..count].copy_from_slice(&bytes[start..start + count]);
            Ok(count)
        })
    }

    fn free_room(&self, _folder: &Number, _path: &Path) -> Result<Room, CommitError> {
        Ok(Room { bytes: u64::MAX, files: u64::MAX })
    }

    fn read_link(&self, folder: &Number, name: &OsStr, path: &Path) -> Result<OsString, CommitError> {
        self.call(path, |world| match &*world.nodes[world.find(*folder, name)?] {
            Node::Link(target) => Ok(target.clone()),
            _ => Err(Errno::INVAL),
        })
    }

    fn is_local(&self, _folder: &Number) -> bool {
        true
    }

    // The machine starts again: no lock is held.

    fn lock_folder(&self, _folder: &Number, _sharing: LockMode, _path: &Path) -> Result<LockOutcome, CommitError> {
        Ok(LockOutcome::Taken)
    }

    fn lock_file(&self, _file: &Number, _sharing: LockMode, _path: &Path) -> Result<LockOutcome, CommitError> {
        Ok(LockOutcome::Taken)
    }

    fn unlock_file(&self, _file: &Number) {}

    fn lock_file_for_process(&self, _file: &Number, _path: &Path) -> Result<LockOutcome, CommitError> {
        Ok(LockOutcome::Taken)
    }

    fn create_folder(&self, parent: &Number, name: &OsStr, path: &Path) -> Result<(), CommitError> {
        self.call(path, |world| match world.find(*parent, name) {
            Ok(_) => Err(Errno::EXIST),
            Err(_) => {
                world.make(*parent, name, Node::Folder(BTreeMap::new()));
                Ok(())
            }
        })
    }

    fn create_hidden_folder(&self, parent: &Number, name: &OsStr, path: &Path) -> Result<(), CommitError> {
        self.create_folder(parent, name, path)
    }

    fn open_to_readers(&self, _folder: &Number, _path: &Path) -> Result<(), CommitError> {
        Ok(())
    }

    fn unmark(&self, _folder: &Number) {}

    fn create_file(&self, folder: &Number, name: &OsStr, path: &Path) -> Result<Number, CommitError> {
        self.call(path, |world| match world.find(*folder, name) {
            Ok(_) => Err(Errno::EXIST),
            Err(_) => Ok(world.make(*folder, name, Node::File(Vec::new()))),
        })
    }

    fn create_link(&self, folder: &Number, name: &OsStr, target: &OsStr, path: &Path) -> Result<(), CommitError> {
        self.call(path, |world| match world.find(*folder, name) {
            Ok(_) => Err(Errno::EXIST),
            Err(_) if world.is_full => Err(Errno::NOSPC),
            Err(_) => {
                world.make(*folder, name, Node::Link(target.to_owned()));
                Ok(())
            }
        })
    }

    fn allocate(&self, file: &Number, length: u64, path: &Path) -> Result<(), CommitError> {
        self.truncate(file, length, path)
    }

    fn write_at(&self, file: &Number, offset: u64, bytes: &[u8], path: &Path) -> Result<usize, CommitError> {
        self.call(path, |world| {
            // Never more than half, so that every file is written in several steps.
            let count = if bytes.len() > 8 { bytes.len() / 2 } else { bytes.len() };
            let offset = usize::try_from(offset).unwrap();
            if world.is_full && offset + count > world.bytes(*file).len() {
                return Err(Errno::NOSPC);
            }
            world.change(Change::Write(*file, offset, bytes[..count].to_vec()));
            Ok(count)
        })
    }

    fn truncate(&self, file: &Number, length: u64, path: &Path) -> Result<(), CommitError> {
        self.call(path, |world| {
            world.change(Change::Length(*file, usize::try_from(length).unwrap()));
            Ok(())
        })
    }

    // These two start early what an fsync has to do; they promise nothing.

    fn start_writeback(&self, _file: &Number, _range: &Range<u64>, _path: &Path) -> Result<(), CommitError> {
        Ok(())
    }

    fn wait_for_writeback(&self, _file: &Number, _range: &Range<u64>, _path: &Path) -> Result<(), CommitError> {
        Ok(())
    }

    fn evict(&self, _file: &Number) {}

    fn fsync(&self, file: &Number, path: &Path) -> Result<(), CommitError> {
        self.call(path, |world| {
            world.change(Change::SyncFile(*file));
            Ok(())
        })
    }

    fn fsync_folder(&self, folder: &Number, path: &Path) -> Result<(), CommitError> {
        self.call(path, |world| {
            world.change(Change::SyncFolder(*folder));
            Ok(())
        })
    }

    fn rename(
        &self,
        (from_folder, from): (&Number, &OsStr),
        (to_folder, to): (&Number, &OsStr),
        path: &Path,
    ) -> Result<(), CommitError> {
        self.call(path, |world| {
            let moved = world.find(*from_folder, from)?;
            let is_folder = matches!(*world.nodes[moved], Node::Folder(_));
            match world.find(*to_folder, to).map(|replaced| &*world.nodes[replaced]) {
                Ok(Node::Folder(names)) if is_folder && names.is_empty() => {}
                Ok(Node::Folder(_)) if is_folder => return Err(Errno::NOTEMPTY),
                Ok(Node::Folder(_)) => return Err(Errno::ISDIR),
                Ok(_) if is_folder => return Err(Errno::NOTDIR),
                _ => {}
            }
            let names = vec![(*from_folder, from.to_owned(), None), (*to_folder, to.to_owned(), Some(moved))];
            world.change(Change::Names(names));
            Ok(())
        })
    }

    fn rename_new(
        &self,
        (from_folder, from): (&Number, &OsStr),
        (to_folder, to): (&Number, &OsStr),
        path: &Path,
    ) -> Result<(), CommitError> {
        self.call(path, |world| match world.find(*to_folder, to) {
            Ok(_) => Err(Errno::EXIST),
            Err(_) => world.find(*from_folder, from).map(|_| ()),
        })?;
        self.rename((from_folder, from), (to_folder, to), path)
    }

    fn exchange(
        &self,
        (one_folder, one): (&Number, &OsStr),
        (other_folder, other): (&Number, &OsStr),
        path: &Path,
    ) -> Result<(), CommitError> {
        self.call(path, |world| {
            let (first, second) = (world.find(*one_folder, one)?, world.find(*other_folder, other)?);
            let names =
                vec![(*one_folder, one.to_owned(), Some(second)), (*other_folder, other.to_owned(), Some(first))];
            world.change(Change::Names(names));
            Ok(())
        })
    }

    fn remove_file(&self, folder: &Number, name: &OsStr, path: &Path) -> Result<(), CommitError> {
        self.call(path, |world| {
            match &*world.nodes[world.find(*folder, name)?] {
                Node::Folder(_) => return Err(Errno::ISDIR),
                Node::File(bytes) => world.is_full &= bytes.is_empty(),
                Node::Link(_) => {}
            }
            world.change(Change::Names(vec![(*folder, name.to_owned(), None)]));
            Ok(())
        })
    }

    fn remove_folder(&self, parent: &Number, name: &OsStr, path: &Path) -> Result<(), CommitError> {
        self.call(path, |world| {
            match &*world.nodes[world.find(*parent, name)?] {
                Node::Folder(names) if names.is_empty() => {}
                Node::Folder(_) => return Err(Errno::NOTEMPTY),
                _ => return Err(Errno::NOTDIR),
            }
            world.change(Change::Names(vec![(*parent, name.to_owned(), None)]));
            Ok(())
        })
    }
}
