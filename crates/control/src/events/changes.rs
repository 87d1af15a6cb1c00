//! The events that a request causes.

use crate::message::{
    BackupRequest, Change, DiskRequest, LabelRequest, ReceiveRequest, Reply, Request, SnapshotRequest,
};
use disk::convert::Address;
use disk::full::WaitNotice;
use disk::{DefaultsChange, DiskInfo};

/// The changes that a request will make, as far as they are known before the request is carried out.
pub enum Changes {
    /// The contained changes, if the request succeeds.
    Known(Vec<Change>),
    /// Disks are created; the reply names them.
    NewDisks,
    /// A disk is resized; the reply has its new capacity.
    Resized,
}

/// The change that a notice about waiting writes describes.
impl From<WaitNotice> for Change {
    fn from(notice: WaitNotice) -> Self {
        match notice {
            WaitNotice::Begins { disk, reason } => Self::WritesWait { disk, reason },
            WaitNotice::Ends { disk, written, refused, dropped, seconds } => {
                Self::WritesGoOn { disk, written, refused, dropped, seconds }
            }
        }
    }
}

fn created(disk: &DiskInfo) -> Change {
    Change::DiskCreated { disk: disk.name.clone(), origin: disk.origin.clone() }
}

impl Changes {
    /// The changes, after the request has succeeded.
    pub fn after(self, reply: &Reply) -> Vec<Change> {
        match (self, reply) {
            (Self::Known(changes), _) => changes,
            (Self::NewDisks, Reply::Disk(disk)) => vec![created(disk)],
            (Self::NewDisks, Reply::Disks(disks)) => disks.iter().map(created).collect(),
            (Self::Resized, Reply::Resized(resized)) => {
                let disk = &resized.disk;
                vec![Change::DiskResized { disk: disk.name.clone(), capacity: disk.capacity }]
            }
            (Self::NewDisks | Self::Resized, _) => Vec::new(),
        }
    }
}

/// The changes that a request will make if it succeeds.
pub fn of(request: &Request) -> Changes {
    match request {
        Request::Disk(request) => of_disk(request),
        Request::Snapshot(request) => Changes::Known(of_snapshot(request)),
        Request::Label(LabelRequest::Limit { label, .. }) => {
            Changes::Known(vec![Change::LabelChanged { label: label.clone() }])
        }
        Request::Clone { .. } => Changes::NewDisks,
        Request::Convert(conversion) => Changes::Known(match &conversion.to {
            Address::Disk(disk) => vec![Change::DiskCreated { disk: disk.clone(), origin: None }],
            Address::Path(_) => Vec::new(),
        }),
        Request::Receive(ReceiveRequest::Delete { id }) => {
            Changes::Known(vec![Change::ReceptionDeleted { id: id.clone() }])
        }
        Request::Backup(request) => Changes::Known(of_backup(request)),
        // Operations on machines change disks by requests of their own, and a transfer itself publishes the changes of
        // its snapshots.
        Request::Machine(_)
        | Request::Send(_)
        | Request::Status
        | Request::StatusSpace
        | Request::Label(LabelRequest::List)
        | Request::Check { .. }
        | Request::Scrub(_)
        | Request::Salvage(_)
        | Request::ExportArchive(_)
        | Request::Image(_)
        | Request::ExportList
        | Request::Receive(ReceiveRequest::List)
        | Request::Settle
        | Request::Job(_)
        | Request::Events => Changes::Known(Vec::new()),
    }
}

/// A backup itself publishes the changes of the snapshots that it takes.
fn of_backup(request: &BackupRequest) -> Vec<Change> {
    match request {
        BackupRequest::Restore(restore) if restore.update => {
            vec![Change::DiskChanged { disk: restore.name.clone(), by: "backup restore".to_owned() }]
        }
        BackupRequest::Restore(restore) => vec![Change::DiskCreated { disk: restore.name.clone(), origin: None }],
        BackupRequest::Create(_)
        | BackupRequest::CreateMachine(_)
        | BackupRequest::PrepareMachine { .. }
        | BackupRequest::Key { .. }
        | BackupRequest::List { .. }
        | BackupRequest::Verify { .. }
        | BackupRequest::Delete { .. }
        | BackupRequest::Prune { .. } => Vec::new(),
    }
}

fn of_disk(request: &DiskRequest) -> Changes {
    let changed = |disk: &String, by: &str| Change::DiskChanged { disk: disk.clone(), by: by.to_owned() };
    Changes::Known(vec![match request {
        DiskRequest::List
        | DiskRequest::Labelled { .. }
        | DiskRequest::Show { .. }
        | DiskRequest::WouldFree { .. }
        | DiskRequest::Space { .. }
        | DiskRequest::Reclaim { dry_run: true, .. }
        | DiskRequest::Reclaimable
        | DiskRequest::Stats { .. } => return Changes::Known(Vec::new()),
        DiskRequest::Defaults { change } if *change == DefaultsChange::default() => return Changes::Known(Vec::new()),
        DiskRequest::Defaults { .. } => Change::DefaultsChanged,
        DiskRequest::Create { .. } | DiskRequest::Import { .. } => return Changes::NewDisks,
        DiskRequest::Resize { .. } => return Changes::Resized,
        DiskRequest::Rename { name, to, .. } => Change::DiskRenamed { disk: name.clone(), to: to.clone() },
        DiskRequest::Delete { name, .. } | DiskRequest::Migrate { name, to: Some(_), .. } => {
            Change::DiskDeleted { disk: name.clone() }
        }
        DiskRequest::Detach { name } => changed(name, "disk detach"),
        DiskRequest::Tune { name, .. } => changed(name, "disk tune"),
        DiskRequest::Edit { name, .. } => changed(name, "disk edit"),
        DiskRequest::Reopen { name } => changed(name, "disk reopen"),
        DiskRequest::Inflate { name } => changed(name, "disk inflate"),
        DiskRequest::PunchZero { name } => changed(name, "disk punchzero"),
        DiskRequest::Wipe { name } => changed(name, "disk wipe"),
        DiskRequest::Shrink { name } => changed(name, "disk shrink"),
        DiskRequest::Reclaim { name, dry_run: false } => changed(name, "disk reclaim"),
        DiskRequest::Optimize { name, .. } => changed(name, "disk optimize"),
        DiskRequest::Consolidate { name, .. } => changed(name, "disk consolidate"),
        DiskRequest::Migrate { name, to: None, .. } => changed(name, "disk migrate"),
    }])
}

fn of_snapshot(request: &SnapshotRequest) -> Vec<Change> {
    match request {
        SnapshotRequest::Create { of, .. } => {
            let created = |(disk, name): &(String, String)| Change::SnapshotCreated {
                disk: disk.clone(),
                snapshot: name.clone(),
            };
            of.iter().map(created).collect()
        }
        SnapshotRequest::Delete { disk, name, .. } => {
            vec![Change::SnapshotDeleted { disk: disk.clone(), snapshot: name.clone() }]
        }
        SnapshotRequest::Revert { disk, name, .. } => {
            vec![Change::DiskReverted { disk: disk.clone(), snapshot: name.clone() }]
        }
        SnapshotRequest::List { .. } | SnapshotRequest::Show { .. } | SnapshotRequest::Diff { .. } => Vec::new(),
    }
}
