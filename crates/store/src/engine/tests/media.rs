//! Cached data is dropped before recovery, even if the files of a datastore are symbolic links.

use super::*;
use backend::{Directory, File, IoMode};
use std::io;
use std::sync::Mutex;

/// A folder in which the data files are symbolic links: they can be opened, and the list of regular files leaves them
/// out.
struct Links {
    inner: Arc<dyn Directory>,
    opened: Mutex<Vec<String>>,
}

impl Directory for Links {
    backend::forward_directory!(inner: remove, rename, sync, lock, room, queue, queue_kind);

    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        let file = self.inner.open(name, mode)?;
        self.opened.lock().unwrap().push(name.to_owned());
        Ok(file)
    }
    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        self.inner.create(name, mode)
    }
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = self.inner.list()?;
        names.retain(|name| !name.starts_with("data.0"));
        Ok(names)
    }
}

#[test]
fn cached_data_is_dropped_from_data_files_that_are_symbolic_links() {
    let (disk, engine) = made();
    engine.close().unwrap();
    let inner = disk.directory();
    (0..2).for_each(|number| drop(inner.create(&files::data_file_name(number), IoMode::Buffered).unwrap()));
    let links = Links { inner: Arc::clone(&inner), opened: Mutex::default() };
    files::show_media(&links).unwrap();
    let opened = links.opened.into_inner().unwrap();
    let missed: Vec<String> = inner.list().unwrap().into_iter().filter(|name| !opened.contains(name)).collect();
    assert_eq!(missed, ["lock"]);
}
