//! What machines need of whoever keeps their disks.

use backend::Result;
use std::path::PathBuf;

/// A datastore, as machines see it. Methods may be called from any thread.
pub trait Disks: Send + Sync {
    /// The Unix socket of its NBD server.
    ///
    /// # Errors
    /// With what to do, when it is not served.
    fn server(&self) -> Result<PathBuf>;

    /// Capacity of a disk in bytes; `NotFound` when there is none of that name.
    fn capacity(&self, disk: &str) -> Result<u64>;

    /// Takes snapshots of several disks at one point: (disk, snapshot).
    fn snapshot(&self, of: &[(String, String)]) -> Result<()>;

    /// Deletes a snapshot.
    fn delete_snapshot(&self, disk: &str, snapshot: &str) -> Result<()>;

    /// Makes a disk that nobody uses as it was at a snapshot.
    fn revert(&self, disk: &str, snapshot: &str) -> Result<()>;

    /// Makes linked clones of a snapshot: all of them or none.
    fn clone_linked(&self, disk: &str, snapshot: &str, names: &[String]) -> Result<()>;

    /// Makes an independent copy of a disk, or of a snapshot of it, whole or not at all. `progress` is told bytes done
    /// and in all, and answers whether to go on.
    fn clone_full(
        &self,
        disk: &str,
        snapshot: Option<&str>,
        name: &str,
        progress: &(dyn Fn(u64, u64) -> bool + Sync),
    ) -> Result<()>;

    /// Deletes a disk with its snapshots; `Busy` when somebody uses it or clones stand on it.
    fn delete(&self, disk: &str) -> Result<()>;
}
