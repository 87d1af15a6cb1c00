//! Where a repository is.

use crate::bucket::{Bucket, BucketAddress, Credentials};
use crate::objects::{Folder, Objects};
use crate::repository::Repository;
use error::Result;
use std::path::PathBuf;
use std::sync::Arc;

/// The place of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepositoryPlace {
    /// A folder.
    Folder(PathBuf),
    /// A place in a bucket. Without credentials, those in the environment of the process are used.
    Bucket(BucketAddress, Option<Credentials>),
}

impl RepositoryPlace {
    /// Opens the repository: `NotFound` if there is none.
    pub fn open(&self) -> Result<Repository> {
        let objects: Arc<dyn Objects> = match self {
            Self::Folder(path) => Arc::new(Folder::open(path)?),
            Self::Bucket(address, credentials) => bucket(address, credentials.as_ref())?,
        };
        Repository::open(objects)
    }

    /// As [`RepositoryPlace::open`]; makes a new repository in an empty place. A missing folder is created, a missing
    /// bucket is not.
    pub fn open_or_create(&self) -> Result<Repository> {
        let objects: Arc<dyn Objects> = match self {
            Self::Folder(path) => Arc::new(Folder::open_or_create(path)?),
            Self::Bucket(address, credentials) => bucket(address, credentials.as_ref())?,
        };
        Repository::open_or_create(objects)
    }
}

fn bucket(address: &BucketAddress, credentials: Option<&Credentials>) -> Result<Arc<dyn Objects>> {
    let credentials = credentials.cloned().or_else(Credentials::from_environment);
    Ok(Arc::new(Bucket::new(address, credentials)?))
}
