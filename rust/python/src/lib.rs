//! The compiled module `tundish._native`: bindings only.
//!
//! Each folder here binds one core crate. Long work enters through `enter`, and `error` maps the errors of all crates.
//! No thread outlives the call that started it, so none is inherited over `fork`. The exceptions are the threads that
//! write and copy in `checkpoint`: they belong to a save.
#![deny(unsafe_code)]

mod atomic_folder;
mod checkpoint;
mod dlpack;
mod error;
mod long_work;
mod packing;
mod shm;
mod store;
mod tensor_inspector;
mod with_gil;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    use pyo3::prelude::*;

    /// Loads numpy's C interface while Ctrl-C is blocked, because an interrupt of its first use would be a panic.
    /// Registers what every child made by `fork` has to do, whichever part its parent used.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        py.import("numpy.lib")?;
        let signal = py.import("signal")?;
        let interrupt = (signal.getattr("SIGINT")?,);
        let before = signal.call_method1("pthread_sigmask", (signal.getattr("SIG_BLOCK")?, interrupt))?;
        numpy::dtype::<i32>(py);
        numpy::npyffi::is_numpy_2(py);
        signal.call_method1("pthread_sigmask", (signal.getattr("SIG_SETMASK")?, before))?;
        super::shm::segment::forget_in_children(py)
    }

    /// Whether environment variables can make the system calls of this module fail, for tests.
    #[pymodule_export]
    const HAS_FAILPOINTS: bool = cfg!(feature = "failpoints");
    #[pymodule_export]
    use super::atomic_folder::{AtomicFolder, replace_file};
    #[pymodule_export]
    use super::checkpoint::checkpoint_root::{
        CheckpointRoot, ReadonlyCheckpointRoot, open_checkpoints_readonly, unfinished_name,
    };
    #[pymodule_export]
    use super::checkpoint::file_image::{FileImage, staging_stats, trim_staging};
    #[pymodule_export]
    use super::checkpoint::file_metadata::{FileMetadata, checksum_file, write_small_file};
    #[pymodule_export]
    use super::checkpoint::read_lock::{CheckpointReadLock, verify_checkpoint};
    #[pymodule_export]
    use super::checkpoint::shard_writer::ShardWriter;
    #[pymodule_export]
    use super::checkpoint::tensor_copy::TensorCopy;
    #[pymodule_export]
    use super::dlpack::{TensorBuilder, TensorExchange};
    #[pymodule_export]
    use super::packing::{
        PackLookup, PlanChecks, StreamPacker, balanced_parts, integers_of_list, micro_batches, mix_packs, open_plan,
        pack, pack_to_folder, plan_fingerprint, shuffled_indices,
    };
    #[pymodule_export]
    use super::shm::buffers::{
        BufferReceiver, ReceivedBuffer, SegmentArena, SendBuffer, SentBuffer, default_arena_limit,
    };
    #[pymodule_export]
    use super::shm::segment::sweep_segments;
    #[pymodule_export]
    use super::shm::segment::{SegmentView, SharedSegment, set_shared_cache_limit, shared_stats};
    #[pymodule_export]
    use super::shm::task_queue::is_plain;
    #[pymodule_export]
    use super::shm::task_queue::{TaskQueue, available_processors, exit_with_parent};
    #[pymodule_export]
    use super::store::dtypes::stored_dtypes;
    #[pymodule_export]
    use super::store::handle::RTensor;
    #[pymodule_export]
    use super::store::http::{ShardServer, WorkerClient, trust_owner};
    #[pymodule_export]
    use super::store::shard_store::{ShardStore, shard_ids};
    #[pymodule_export]
    use super::store::shard_view::{ShardView, tensors_over};
    #[pymodule_export]
    use super::tensor_inspector::TensorInspector;
}
