//! The disk methods that all test disks forward to the real one.

/// Hands their signatures to the macro `$emit`, after the name of the argument that is the path.
macro_rules! forwarded {
    ($emit:ident) => {
        $emit! {
            path:
            fn open_path(path: &Path) -> Outcome<Folder>;
            fn open_folder(parent: &Folder, name: &OsStr, path: &Path) -> Outcome<Folder>;
            fn open_file(folder: &Folder, name: &OsStr, path: &Path) -> Outcome<File>;
            fn open_file_for_writing(folder: &Folder, name: &OsStr, path: &Path) -> Outcome<File>;
            fn open_file_for_direct_writing(folder: &Folder, name: &OsStr, path: &Path) -> Outcome<Option<File>>;
            fn open_or_create_file(folder: &Folder, name: &OsStr, path: &Path) -> Outcome<File>;
            fn folder_stat(folder: &Folder, path: &Path) -> Outcome<FileStat>;
            fn file_stat(file: &File, path: &Path) -> Outcome<FileStat>;
            fn read(file: &File, path: &Path) -> Outcome<Vec<u8>>;
            fn read_at(file: &File, offset: u64, buffer: &mut [u8], path: &Path) -> Outcome<usize>;
            fn free_room(folder: &Folder, path: &Path) -> Outcome<tundish_commit::disk::Room>;
            fn read_link(folder: &Folder, name: &OsStr, path: &Path) -> Outcome<OsString>;
            fn create_folder(parent: &Folder, name: &OsStr, path: &Path) -> Outcome<()>;
            fn create_hidden_folder(parent: &Folder, name: &OsStr, path: &Path) -> Outcome<()>;
            fn open_to_readers(folder: &Folder, path: &Path) -> Outcome<()>;
            fn create_file(folder: &Folder, name: &OsStr, path: &Path) -> Outcome<File>;
            fn create_link(folder: &Folder, name: &OsStr, target: &OsStr, path: &Path) -> Outcome<()>;
            fn allocate(file: &File, length: u64, path: &Path) -> Outcome<()>;
            fn write_at(file: &File, offset: u64, bytes: &[u8], path: &Path) -> Outcome<usize>;
            fn truncate(file: &File, length: u64, path: &Path) -> Outcome<()>;
            fn start_writeback(file: &File, range: &Range<u64>, path: &Path) -> Outcome<()>;
            fn wait_for_writeback(file: &File, range: &Range<u64>, path: &Path) -> Outcome<()>;
            fn fsync(file: &File, path: &Path) -> Outcome<()>;
            fn fsync_folder(folder: &Folder, path: &Path) -> Outcome<()>;
            fn rename(from: (&Folder, &OsStr), to: (&Folder, &OsStr), path: &Path) -> Outcome<()>;
            fn remove_file(folder: &Folder, name: &OsStr, path: &Path) -> Outcome<()>;
            fn remove_folder(folder: &Folder, name: &OsStr, path: &Path) -> Outcome<()>;
        }
    };
}
