//! Making a backup in a repository: on which earlier backup the new backup is based, and how an interrupted backup
//! continues.

use crate::create::{CreateOptions, Created, Sink, Written, describe, is_same, run};
use crate::level::record_of;
use crate::manifest::{Description, Manifest, Parent};
use crate::pack::{HEAD, Head};
use crate::repository::{Repository, is_unusable, pack_name};
use crate::seal::{Key, PackReader};
use disk::transfer::Outgoing;
use error::{Error, ErrorKind, Result};
use std::sync::Arc;
use work::Progress;

struct RepositorySink<'a> {
    repository: &'a Repository,
    id: &'a str,
}

impl Sink for RepositorySink<'_> {
    fn pack(&mut self, head: &Head, bytes: &[u8]) -> Result<()> {
        self.repository.objects().put(&pack_name(self.id, head.number), bytes)
    }

    fn finish(&mut self, manifest: &Manifest) -> Result<()> {
        self.repository.finish(manifest)
    }
}

/// The packs that an interrupted attempt has stored. A pack is stored as a whole, so it is sufficient to read its head
/// and index.
fn written(repository: &Repository, description: &Description, key: Option<&Arc<Key>>) -> Result<Written> {
    let objects = repository.objects();
    let id = description.id_bytes()?;
    let mut written = Written::default();
    loop {
        let number = written.packs.len() as u32;
        let name = pack_name(&description.id, number);
        let Some(length) = objects.length(&name)?.filter(|length| *length >= HEAD as u64) else { return Ok(written) };
        let bytes = objects.read(&name, 0..HEAD as u64)?;
        let Ok(head) = Head::decode(&bytes) else { return Ok(written) };
        if (head.backup, head.number, head.first, head.length()) != (id, number, written.end(), length) {
            return Ok(written);
        }
        let mut fetch = |range| objects.read(&name, range);
        let reader = match PackReader::new(head, key, &mut fetch) {
            Ok(reader) => reader,
            Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(written),
            Err(error) => return Err(error),
        };
        let index = match reader.read(head.index_range(), &mut fetch).and_then(|bytes| head.decode_index(&bytes)) {
            Ok(index) => index,
            Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(written),
            Err(error) => return Err(error),
        };
        written.add(record_of(&head, &bytes), &index);
    }
}

impl Repository {
    /// Backs up a snapshot. The backup is based on the closest snapshot that the repository has already, unless it
    /// should be `full`. A snapshot that was backed up before is not backed up again. All backups of a chain have the
    /// same key or none.
    ///
    /// # Errors
    /// `Busy` while another command changes the repository; `Interrupted` after a cancellation; `Invalid` without a key
    /// if other backups are encrypted, because the data would be stored unencrypted by mistake.
    pub fn create(
        &self,
        outgoing: &Outgoing,
        disk: &str,
        full: bool,
        options: CreateOptions<'_>,
        progress: &dyn Progress,
    ) -> Result<Created> {
        let _lock = self.lock()?;
        let manifests = self.manifests()?;
        self.check_key(&manifests, options)?;
        let earlier = Earlier { manifests: &manifests, number: next_number(&manifests) };
        self.create_locked(outgoing, disk, full, options, progress, earlier)
    }

    /// Refuses to store data unencrypted by mistake.
    pub(crate) fn check_key(&self, manifests: &[Manifest], options: CreateOptions<'_>) -> Result<()> {
        if options.key.is_none() && manifests.iter().any(|manifest| manifest.backup.key.is_some()) {
            let text =
                format!("the backups in '{}' are encrypted: give the file of their key with --key-file", self.place());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(())
    }

    /// Whether a disk can be restored from a backup, and all backups of its chain have the same key as the new one.
    pub(crate) fn is_usable(&self, manifest: &Manifest, options: CreateOptions<'_>) -> Result<bool> {
        let wanted = options.key.map(|key| key.id());
        let same_key = |manifest: &Manifest| manifest.backup.key.as_deref() == wanted;
        match self.chain(manifest.clone()) {
            Ok(chain) => Ok(chain.iter().all(same_key)),
            Err(error) if is_unusable(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The newest usable backup of the snapshot with an identity.
    fn backup_of<'a>(
        &self,
        manifests: &'a [Manifest],
        point: &str,
        options: CreateOptions<'_>,
    ) -> Result<Option<&'a Manifest>> {
        for known in manifests.iter().rev().filter(|known| known.backup.point.uuid == point) {
            if self.is_usable(known, options)? {
                return Ok(Some(known));
            }
        }
        Ok(None)
    }

    /// As [`Repository::create`]; the caller holds the lock, and has checked the key.
    pub(crate) fn create_locked(
        &self,
        outgoing: &Outgoing,
        disk: &str,
        full: bool,
        options: CreateOptions<'_>,
        progress: &dyn Progress,
        earlier: Earlier<'_>,
    ) -> Result<Created> {
        let with = |point: &str| self.backup_of(earlier.manifests, point, options);
        if let Some(known) = with(&outgoing.point().uuid)?.filter(|known| !full || known.backup.parent.is_none()) {
            // The attempt that wrote the manifest may have been killed before the manifest's name was durable.
            self.objects().settle()?;
            return Ok(Created::already(known));
        }
        let parent = match full {
            true => None,
            false => outgoing.bases().iter().find_map(|base| with(base).transpose()).transpose()?,
        };
        let parent =
            parent.map(|known| Parent { backup: Some(known.backup.id.clone()), point: known.backup.point.clone() });
        let mut resumed = None;
        for known in self.unfinished()?.into_iter().filter(|known| known.machine.is_none()) {
            let same = is_same(&known, outgoing, parent.as_ref().map(|parent| &parent.point), options);
            if same && known.parent == parent && resumed.is_none() {
                resumed = Some(known);
            } else if (known.disk.as_str(), &known.point.name) == (disk, &outgoing.point().name) {
                // This unfinished backup cannot continue: its snapshot was deleted, and another snapshot has the name
                // now, or it is based on another backup.
                self.remove(&known.id)?;
            }
        }
        let (description, written) = match resumed {
            Some(known) => {
                let written = written(self, &known, options.key)?;
                (known, written)
            }
            None => {
                let mut description = describe(outgoing, disk, parent, options)?;
                description.number = earlier.number;
                self.begin(&description)?;
                (description, Written::default())
            }
        };
        let mut sink = RepositorySink { repository: self, id: &description.id };
        run(outgoing, &description, written, &mut sink, options, progress)
    }
}

/// What a new backup needs to know of the backups in the repository.
#[derive(Clone, Copy)]
pub(crate) struct Earlier<'a> {
    /// Their manifests.
    pub manifests: &'a [Manifest],
    /// The number of the new backup.
    pub number: u64,
}

/// The number of the next backup.
pub(crate) fn next_number(manifests: &[Manifest]) -> u64 {
    manifests.iter().map(|known| known.backup.number).max().unwrap_or(0) + 1
}
