//! The disks of machines: requests about them to the datastore, which is open in this process or in its server.

use crate::dispatch::{Part, Target, Watch, dispatch};
use crate::message::{DiskRequest, ImageRequest, ReceiveRequest, Reply, Request, SnapshotRequest};
use disk::convert::{Address, Conversion, ImageOptions, SourceFormat, TargetFormat, descriptor_of, member_capacity};
use disk::migrate::{ImportMode, ImportOptions, MigrateOptions};
use disk::{DiskFormat, DiskInfo, NewDisk, NoProgress, Point, Progress, Provisioning, SettingsChange, SnapshotOptions};
use error::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vm::disks::{Disks, Facts, ImageFacts, SnapshotFacts};
use vm::import::Content;
use vm::import::run::How;

/// The disks of a datastore, accessed by requests.
struct Bound {
    target: Target,
}

/// The disks of a datastore, in the form that crate `vm` needs.
pub fn disks(target: Target) -> Arc<dyn Disks> {
    Arc::new(Bound { target })
}

// Requests about disks of a machine use `force`: the machine's processes have ended, so that none of them reconnects.

/// Passes the progress of a copy on to the progress of the machine's operation.
pub(super) struct Copy<'a>(pub &'a dyn Progress);

impl Progress for Copy<'_> {
    fn update(&self, done: u64, total: u64) {
        self.0.update(done, total);
    }

    fn cancelled(&self) -> bool {
        self.0.cancelled()
    }
}

impl Watch for Copy<'_> {
    fn part(&self, part: Part) -> Result<()> {
        NoProgress.part(part)
    }
}

impl Bound {
    fn ask(&self, request: Request) -> Result<Reply> {
        dispatch(&self.target, request, &NoProgress)
    }
}

/// The error for a reply of a kind that does not belong to the request.
pub fn unexpected(reply: &Reply) -> Error {
    let mut text = format!("the server sent a reply that does not match the request: {reply:?}");
    text.truncate(text.char_indices().nth(200).map_or(text.len(), |(at, _)| at));
    Error::new(ErrorKind::Invalid, text)
}

fn facts(info: DiskInfo) -> (String, Facts) {
    let origin = info.origin.as_deref().and_then(|origin| origin.split_once('@'));
    let facts = Facts {
        capacity: info.capacity,
        origin: origin.map(|(disk, snapshot)| (disk.to_owned(), snapshot.to_owned())),
        clients: info.clients,
        created: info.created,
    };
    (info.name, facts)
}

impl Disks for Bound {
    fn server(&self) -> Result<PathBuf> {
        let Reply::Status { serving, .. } = self.ask(Request::Status)? else {
            return Err(Error::new(ErrorKind::Invalid, "the server's reply does not match the request for the status"));
        };
        let at = super::location(&self.target)?;
        match serving {
            None => {
                let text =
                    format!("datastore '{at}' is not served, and machines need a server: run 'lamina serve {at}'");
                Err(Error::new(ErrorKind::Unsupported, text))
            }
            Some(serving) if serving.read_only => {
                let text = format!("datastore '{at}' is served read-only: machines write to their disks");
                Err(Error::new(ErrorKind::ReadOnly, text))
            }
            Some(serving) => serving.socket.ok_or_else(|| {
                let text = format!("datastore '{at}' is not served on a Unix socket, which machines need");
                Error::new(ErrorKind::Unsupported, text)
            }),
        }
    }

    fn all(&self) -> Result<BTreeMap<String, Facts>> {
        match self.ask(Request::Disk(DiskRequest::List))? {
            Reply::Disks(disks) => Ok(disks.into_iter().map(facts).collect()),
            other => Err(unexpected(&other)),
        }
    }

    fn create(&self, disk: &str, capacity: u64) -> Result<()> {
        let new = NewDisk::native(capacity, Provisioning::Thin);
        let (name, settings) = (disk.to_owned(), SettingsChange::default());
        self.ask(Request::Disk(DiskRequest::Create { name, new, settings })).map(drop)
    }

    fn image(&self, path: &Path, format: Option<&str>, permitted: &[PathBuf]) -> Result<ImageFacts> {
        let format = format.map(str::parse).transpose()?;
        let options = ImageOptions { format, permitted: permitted.to_vec(), resolved: true, ..ImageOptions::default() };
        let request = Request::Image(ImageRequest::Show { path: path.to_owned(), options });
        match dispatch(&Target::Files, request, &NoProgress)? {
            Reply::Image(info) => match (info.problem, info.levels.first()) {
                (Some(problem), _) => Err(Error::new(ErrorKind::Corrupt, problem)),
                (None, Some(level)) => {
                    Ok(ImageFacts { capacity: level.capacity, internal_snapshots: level.internal_snapshots })
                }
                (None, None) => Err(Error::new(ErrorKind::Corrupt, format!("'{}' has no content", path.display()))),
            },
            other => Err(unexpected(&other)),
        }
    }

    fn member(&self, archive: &Path, member: &str) -> Result<u64> {
        member_capacity(archive, member)
    }

    fn descriptor(&self, archive: &Path) -> Result<Vec<u8>> {
        descriptor_of(archive)
    }

    fn import(&self, disk: &str, content: &Content, how: &How, progress: &dyn Progress) -> Result<()> {
        let name = disk.to_owned();
        let request = match content {
            Content::Empty { capacity } => return self.create(disk, *capacity),
            Content::Image { path, format } => Request::Disk(DiskRequest::Import {
                name,
                import: ImportOptions {
                    path: path.clone(),
                    format: format.as_deref().map(str::parse).transpose()?,
                    way: if how.live { ImportMode::Live } else { ImportMode::Copy },
                    target: MigrateOptions {
                        format: DiskFormat::Native,
                        provisioning: Provisioning::Thin,
                        delta: None,
                    },
                    permitted: how.permitted.clone(),
                    force_parent: false,
                    replay_journal: false,
                    rate: how.rate,
                    resolved: true,
                },
            }),
            Content::Member { archive, member } => Request::Convert(Box::new(Conversion {
                from: Address::Path(archive.clone()),
                to: Address::Disk(name),
                format: TargetFormat::Native,
                options: ImageOptions {
                    format: Some(SourceFormat::Ova),
                    member: Some(member.clone()),
                    permitted: how.permitted.clone(),
                    ..ImageOptions::default()
                },
                rate: how.rate,
                skip_damaged: false,
            })),
        };
        dispatch(&self.target, request, &Copy(progress)).map(drop)
    }

    fn snapshot(&self, of: &[(String, String)]) -> Result<()> {
        if of.is_empty() {
            return Ok(());
        }
        let request = SnapshotRequest::Create { of: of.to_vec(), options: SnapshotOptions::default() };
        self.ask(Request::Snapshot(request)).map(drop)
    }

    fn snapshots(&self, disk: &str) -> Result<Vec<SnapshotFacts>> {
        match self.ask(Request::Snapshot(SnapshotRequest::List { disk: Some(disk.to_owned()) }))? {
            Reply::Snapshots(all) => Ok(all
                .into_iter()
                .map(|one| SnapshotFacts { name: one.name, created: one.created, clones: one.clones })
                .collect()),
            other => Err(unexpected(&other)),
        }
    }

    fn delete_snapshot(&self, disk: &str, snapshot: &str) -> Result<()> {
        let (disk, name) = (disk.to_owned(), snapshot.to_owned());
        self.ask(Request::Snapshot(SnapshotRequest::Delete { disk, name, direction: None, rate: 0, force: true }))
            .map(drop)
    }

    fn revert(&self, disk: &str, snapshot: &str) -> Result<()> {
        let (disk, name) = (disk.to_owned(), snapshot.to_owned());
        self.ask(Request::Snapshot(SnapshotRequest::Revert { disk, name, force: true })).map(drop)
    }

    fn clone_linked(&self, disk: &str, snapshot: &str, names: &[String]) -> Result<()> {
        let at = Point::Snapshot(snapshot.to_owned());
        self.ask(Request::Clone { disk: disk.to_owned(), at, names: names.to_vec(), full: false }).map(drop)
    }

    fn clone_full(&self, disk: &str, snapshot: &str, name: &str, progress: &dyn Progress) -> Result<()> {
        let at = Point::Snapshot(snapshot.to_owned());
        let request = Request::Clone { disk: disk.to_owned(), at, names: vec![name.to_owned()], full: true };
        dispatch(&self.target, request, &Copy(progress)).map(drop)
    }

    fn delete(&self, disk: &str, promote: bool) -> Result<()> {
        self.ask(Request::Disk(DiskRequest::Delete { name: disk.to_owned(), promote, force: true })).map(drop)
    }

    fn forget_restores(&self, disks: &[(String, u64)]) -> Result<()> {
        let all = match self.ask(Request::Receive(ReceiveRequest::List))? {
            Reply::Receptions(all) => all,
            other => return Err(unexpected(&other)),
        };
        for one in all.into_iter().filter(|one| !one.active && !one.machine) {
            let [name] = &one.disks[..] else { continue };
            // Times are rounded to seconds.
            if disks.iter().any(|(disk, since)| disk == name && one.begun + 1 >= *since) {
                self.ask(Request::Receive(ReceiveRequest::Delete { id: one.id.clone() }))?;
            }
        }
        Ok(())
    }

    fn settle(&self) -> Result<()> {
        self.ask(Request::Settle).map(drop)
    }
}
