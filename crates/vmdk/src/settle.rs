//! Finishing committed operations, and undoing operations that were not committed.
//!
//! Every step can be repeated after an interruption. So the same code is used at the end of every operation, at the
//! beginning of the next operation if the last operation failed, and when a disk is opened after a crash:
//!
//! 1. descriptors are corrected: the CID of an image that has replaced another one, and the hints of the images above;
//! 2. after a merge that was not committed: after a merge down, the image above the target records the target's new CID
//!    as its parent CID, because the visible content of that image is unchanged; after a merge up, the old CID is
//!    restored in the target, whose visible content is unchanged. If the corrected descriptor is inside an extent, the
//!    record gets the new text of the descriptor first, because a power cut may tear the descriptor while it is
//!    overwritten;
//! 3. files that are not needed any more, or were never completed, are removed; if a full file system has no space for
//!    the corrections, files are removed first;
//! 4. the record is committed without a pending operation, and VMware's list is written.

use crate::disk::Disk;
use crate::images::{keep_content, list, remove};
use crate::line::Level;
use crate::record::{Fate, FileRecord, MergeSide, Merging, ParentNow, Pending, Record, Settlement};
use crate::stored::{RECORD_NEW, RECORD_SPARE};
use crate::vmsd::{Vmsd, VmsdDisk, VmsdSnapshot};
use crate::{Error, ErrorKind, Result};
use backend::{Access, IoMode};
use layer::descriptor::Descriptor;
use layer::descriptor::storage::NEW_SUFFIX;
use layer::image::parent_hint;
use std::collections::{BTreeSet, HashSet};

impl Disk {
    /// Called after opening: finishes or undoes the operation of the previous owner.
    pub(crate) fn recover(&self) -> Result<()> {
        let directory = &**self.home.directory();
        remove(directory, RECORD_NEW)?;
        remove(directory, RECORD_SPARE)?;
        let record = self.record();
        match record.pending.as_ref().and_then(|pending| pending.fate) {
            Some(fate) => {
                self.forget()?;
                let what = match fate {
                    Fate::Creating => "its creation was interrupted",
                    Fate::Deleting => "its deletion was interrupted and is done now",
                };
                let text = format!("there is no disk '{}': {what}", record.name);
                return Err(Error::new(ErrorKind::NotFound, text));
            }
            None => self.sweep(&record)?,
        }
        match self.finish_pending() {
            // The operation stays pending until there is space. Meanwhile, the disk can be used or deleted.
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                tracing::warn!(%error, disk = self.name(), "an interrupted operation needs free space to finish");
                self.state.lock().unsettled = true;
            }
            other => other?,
        }
        self.write_list();
        Ok(())
    }

    /// Finishes the operation for which the opening lacked space. If there is still no space, the chain is opened
    /// anyway: the CIDs in descriptors are corrected in place, which needs no space, and a chain with CIDs that do not
    /// match is refused when it is opened.
    pub(crate) fn settled(&self) -> Result<()> {
        self.noting(|| {
            let unsettled = self.state.lock().unsettled;
            if !unsettled {
                return Ok(());
            }
            match self.begin("opening it") {
                Err(error) if error.kind() == ErrorKind::NoSpace => Ok(()),
                begun => {
                    begun.map(drop).map_err(|error| error.context("an interrupted operation has to be finished first"))
                }
            }
        })
    }

    /// Makes the current record the durable one, if it could not be written when a snapshot was undone. Until then, the
    /// next opening would find the snapshot.
    pub fn write_unrecorded(&self) -> Result<()> {
        let unrecorded = self.state.lock().unrecorded;
        if unrecorded { self.noting(|| self.begin("ending a snapshot").map(drop)) } else { Ok(()) }
    }

    /// Removes temporary files left by replacements of this disk's descriptors.
    fn sweep(&self, record: &Record) -> Result<()> {
        let own: Vec<_> = record.nodes.iter().filter(|node| node.is_own()).collect();
        let folders: BTreeSet<Option<&str>> = own.iter().map(|node| node.folder.as_deref()).collect();
        for reference in folders {
            // A missing folder is reported when the chain is opened.
            let Ok(folder) = self.folder(record, reference) else { continue };
            let directory = &**folder.directory();
            let names = list(directory)?;
            let mut temporary: Vec<String> = own
                .iter()
                .filter(|node| node.folder.as_deref() == reference)
                .map(|node| format!("{}{NEW_SUFFIX}", node.descriptor))
                .collect();
            if reference.is_none() {
                temporary.push(format!("{}{NEW_SUFFIX}", self.vmsd_name(record)));
            }
            let there: Vec<_> = temporary.iter().filter(|name| names.contains(*name)).collect();
            for name in &there {
                remove(directory, name)?;
            }
            if !there.is_empty() {
                directory.sync().map_err(|error| Error::io("making removals durable", error))?;
            }
        }
        Ok(())
    }

    /// Finishes or undoes the pending operation of the record.
    pub(crate) fn finish_pending(&self) -> Result<()> {
        // While it is unknown which of two records is durable, the files of both may be needed.
        self.check_usable()?;
        let mut record = self.record();
        if record.pending.is_none() {
            self.state.lock().unsettled = false;
            return Ok(());
        }
        let finished = self.carry_out(&mut record).and_then(|()| {
            record.pending = None;
            self.commit(record)
        });
        // After a failure, the CIDs of the images may not match.
        self.state.lock().unsettled = finished.is_err();
        finished?;
        self.write_list();
        Ok(())
    }

    /// Performs the steps of a record's pending operation. May commit a record with more corrections, and replaces
    /// `record` by it.
    pub(crate) fn carry_out(&self, record: &mut Record) -> Result<()> {
        let unrecorded = self.state.lock().unrecorded;
        if unrecorded {
            // The durable record still needs the files that are removed below.
            self.commit(record.clone())?;
        }
        self.record_unmerging(record)?;
        let Some(pending) = &record.pending else { return Ok(()) };
        let kept: HashSet<FileRecord> = record.nodes.iter().flat_map(|node| self.files(record, node)).collect();
        let files = pending.made.iter().chain(&pending.gone).filter(|file| !kept.contains(file));
        let files: Vec<FileRecord> = files.cloned().collect();
        match self.put_right(record, pending) {
            // Removing files may free space for the descriptors.
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                self.remove_files(record, &files)?;
                self.put_right(record, pending)
            }
            outcome => outcome.and_then(|()| self.remove_files(record, &files)),
        }
    }

    /// If a merge that was not committed requires the correction of a descriptor inside an extent, replaces the merge
    /// in the record by this correction with the complete text. If there is no space for the new record, overwrites
    /// only the digits of the CIDs and fails: these digits are enough to open the chain, and the text cannot be torn.
    fn record_unmerging(&self, record: &mut Record) -> Result<()> {
        let Some(merging) = record.pending.as_ref().and_then(|pending| pending.merging) else { return Ok(()) };
        let Some(settlement) = self.unmerge(record, &merging)? else { return Ok(()) };
        let settle = self.with_texts(record, vec![settlement])?;
        if settle.iter().all(|settlement| settlement.text.is_none()) {
            return Ok(());
        }
        let mut after = record.clone();
        if let Some(pending) = &mut after.pending {
            pending.merging = None;
            pending.settle.extend(settle.iter().cloned());
        }
        match self.commit(after.clone()) {
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                // Images that the head's chain has open for writing are skipped here. A later attempt corrects them.
                for settlement in settle.iter().filter(|settlement| self.written_level(settlement.node).is_none()) {
                    self.renumber(record, settlement)?;
                }
                return Err(error);
            }
            outcome => outcome?,
        }
        *record = after;
        Ok(())
    }

    /// The level of an image that the head's chain has open for writing.
    fn written_level(&self, node: u32) -> Option<Level> {
        self.open_head().and_then(|line| line.level(node)).filter(Level::is_writing)
    }

    /// Corrects the descriptors. Each one is tried, even if others fail.
    fn put_right(&self, record: &Record, pending: &Pending) -> Result<()> {
        let mut outcome = Ok(());
        for settlement in &pending.settle {
            outcome = outcome.and(self.settle(record, settlement));
        }
        if let Some(merging) = &pending.merging
            && let Some(settlement) = self.unmerge(record, merging)?
        {
            outcome = outcome.and(self.settle(record, &settlement));
        }
        outcome
    }

    /// Corrects a descriptor, through the open image if the head has it open for writing.
    fn settle(&self, record: &Record, settlement: &Settlement) -> Result<()> {
        match self.written_level(settlement.node) {
            Some(level) => {
                let whole = settlement.text.as_deref().map(|text| Descriptor::parse(text.as_bytes())).transpose()?;
                level.image.update_descriptor(|descriptor| match whole {
                    Some(mut whole) => {
                        keep_content(record, settlement, descriptor, &mut whole);
                        *descriptor = whole;
                    }
                    None => self.apply(settlement, descriptor),
                })
            }
            None => self.settle_closed(record, settlement),
        }
    }

    /// The correction of a descriptor after a merge that was not committed; `None` if nothing has to be corrected.
    fn unmerge(&self, record: &Record, merging: &Merging) -> Result<Option<Settlement>> {
        let Ok(node) = record.node(merging.node) else { return Ok(None) };
        match merging.side {
            MergeSide::Down => {
                let Some(above) = merging.above else { return Ok(None) };
                let place = self.place(record, node)?;
                let child = self.place(record, record.node(above)?)?;
                let content = self.parent_content_of(record, node)?;
                let parent = ParentNow::Of { content, hint: parent_hint(&child.folder, &place) };
                Ok(Some(Settlement { node: above, content: None, parent: Some(parent), text: None }))
            }
            // A head keeps its new CID, because it has no children.
            MergeSide::Up if merging.node == record.head => Ok(None),
            MergeSide::Up => {
                Ok(Some(Settlement { node: merging.node, content: merging.content, parent: None, text: None }))
            }
        }
    }

    /// The name of VMware's list of snapshots.
    pub(crate) fn vmsd_name(&self, record: &Record) -> String {
        format!("{}.vmsd", record.stem)
    }

    /// VMware's list of snapshots, derived from the record.
    pub(crate) fn list_of(&self, record: &Record) -> Vmsd {
        let snapshots = record.snapshots.iter().map(|snapshot| {
            let file = record.node(snapshot.node).map_or_else(
                |_| String::new(),
                |node| match &node.folder {
                    None => node.descriptor.clone(),
                    Some(folder) => format!("{folder}/{}", node.descriptor),
                },
            );
            VmsdSnapshot {
                uid: snapshot.uid,
                parent: record.snapshot_before(snapshot).map(|before| before.uid),
                state: format!("{}-Snapshot{}.vmsn", record.stem, snapshot.uid),
                name: snapshot.listed.as_ref().unwrap_or(&snapshot.name).clone(),
                description: snapshot.description.clone(),
                created: snapshot.created,
                disks: vec![VmsdDisk { file, node: "scsi0:0".to_owned() }],
            }
        });
        Vmsd {
            last_uid: record.last_uid,
            current: record.current().map(|snapshot| snapshot.uid),
            need_consolidate: !self.redundant(record).is_empty(),
            snapshots: snapshots.collect(),
        }
    }

    /// Writes VMware's list of snapshots, if it differs. A failure is only logged: the list is derived from the record,
    /// and is written again later.
    pub(crate) fn write_list(&self) {
        let record = self.record();
        if !record.vmsd || record.last_uid == 0 {
            return;
        }
        let name = self.vmsd_name(&record);
        let bytes = self.list_of(&record).to_bytes();
        if let Err(error) = self.replace_list(&name, &bytes) {
            tracing::warn!(%error, file = name, "the list of snapshots could not be written");
        }
    }

    /// Runs a step that needs space. If there is none, VMware's list is removed to free its space, and the step is
    /// tried again. The list is derived from the record, and is written again after the next operation or opening.
    pub(crate) fn with_room(&self, record: &Record, work: impl Fn() -> Result<()>) -> Result<()> {
        let outcome = work();
        let full = outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoSpace);
        match full && record.vmsd && self.home.directory().remove(&self.vmsd_name(record)).is_ok() {
            true => work(),
            false => outcome,
        }
    }

    fn replace_list(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let directory = &**self.home.directory();
        let failed = |error| Error::io(format!("writing '{name}'"), error);
        if let Ok(file) = directory.open_foreign(name, IoMode::Buffered, Access::Read)
            && file.len().map_err(failed)? == bytes.len() as u64
        {
            let mut old = vec![0; bytes.len()];
            file.read_at(&mut old, 0).map_err(failed)?;
            if old == bytes {
                return Ok(());
            }
        }
        backend::replace::durably(directory, name, &format!("{name}{NEW_SUFFIX}"), bytes).map_err(failed)
    }
}
