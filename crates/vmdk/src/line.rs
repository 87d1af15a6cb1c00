//! A line: an image and those below it down to the base, open as one chain.
//!
//! 1. Images are opened by the record, not by the hints in their descriptors. If the parent's CID differs from the CID
//!    that a child records, the line is not opened, unless the caller forces it.
//! 2. Only the top of the head's line is open for writing. Before a lower level is changed, its layer is replaced by a
//!    writable opening of the same image, and afterwards by a read-only one ([`Line::exchange`]).

use crate::disk::Disk;
use crate::record::Record;
use crate::{Error, ErrorKind, Result};
use chain::{Chain, LevelKey};
use layer::Layer;
use layer::image::Image;
use parking_lot::Mutex;
use std::sync::Arc;

/// One level of a line.
#[derive(Clone)]
pub(crate) struct Level {
    pub node: u32,
    pub image: Arc<Image>,
    pub key: LevelKey,
    /// Whether the image was closed for writing and could not be opened for reading since then. Reads use the closed
    /// image.
    pub closed: bool,
}

impl Level {
    /// Whether the level can be changed.
    pub fn is_writing(&self) -> bool {
        self.image.layer().writable() && !self.closed
    }
}

/// An open line.
pub(crate) struct Line {
    pub chain: Arc<Chain>,
    levels: Mutex<Vec<Level>>,
}

impl Line {
    /// The levels, newest first.
    pub fn levels(&self) -> Vec<Level> {
        self.levels.lock().clone()
    }

    /// The level of an image, if the image is in this line.
    pub fn level(&self, node: u32) -> Option<Level> {
        self.levels.lock().iter().find(|level| level.node == node).cloned()
    }

    /// The level of an image that must be in this line.
    pub fn expect(&self, node: u32) -> Result<Level> {
        self.level(node).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format!("{}: image {node} is not in the chain", self.chain.name()))
        })
    }

    /// Closes the chain, with a flush if possible. Whatever fails, the chain takes no more changes: after a flush that
    /// lacks space, its images have the only copy of some changes, so it is stopped.
    pub fn end(&self) {
        if let Err(error) = self.chain.close() {
            self.chain.stop(&error);
        }
    }

    /// Adds a level that a snapshot has pushed on top.
    pub fn pushed(&self, level: Level) {
        self.levels.lock().insert(0, level);
    }

    /// Removes the levels of these images.
    pub fn removed(&self, nodes: &[u32]) {
        self.levels.lock().retain(|level| !nodes.contains(&level.node));
    }

    /// Replaces the opening of an image by another one.
    pub fn exchange(&self, node: u32, image: Arc<Image>) -> Result<()> {
        let level = self.expect(node)?;
        self.chain.replace(level.key, Arc::clone(image.layer()))?;
        if let Some(level) = self.levels.lock().iter_mut().find(|level| level.node == node) {
            level.image = image;
            level.closed = false;
        }
        Ok(())
    }

    /// Closes an image that is open for writing, below the top. The caller replaces it by a read-only opening
    /// afterwards.
    pub fn close(&self, level: &Level) -> Result<()> {
        self.chain.close_level(level.key)?;
        if let Some(level) = self.levels.lock().iter_mut().find(|other| other.node == level.node) {
            level.closed = true;
        }
        Ok(())
    }
}

impl Disk {
    /// Opens the line of an image. With `writable`, its top is open for writing. The layers in `overlay` become the
    /// levels above it.
    pub(crate) fn open_line(
        &self,
        record: &Record,
        id: u32,
        writable: bool,
        overlay: &[Arc<dyn Layer>],
    ) -> Result<Line> {
        let nodes = record.line(id)?;
        let mut images: Vec<Arc<Image>> = Vec::with_capacity(nodes.len());
        let mut accepted = None;
        for (index, node) in nodes.iter().enumerate() {
            let image = self.open_image(record, *node, writable && index == 0)?;
            if let Some(child) = images.last() {
                self.check_parent(child, &image, accepted)?;
            }
            accepted = record.node(*node)?.accepted;
            images.push(Arc::new(image));
        }
        let read_only = !writable && overlay.is_empty();
        let mut layers: Vec<Arc<dyn Layer>> = overlay.to_vec();
        let above = layers.len();
        layers.extend(images.iter().map(|image| Arc::clone(image.layer())));
        let tunables = record.tunables;
        let options = chain::Options {
            read_only,
            // A chain that exceeds the limit still opens; only new levels are refused.
            levels_max: tunables.levels_max.max(layers.len()),
            metadata: chain::Tunables {
                entries: tunables.metadata_entries,
                prefetch_bytes: tunables.prefetch,
                prefetch_extents: tunables.prefetch_extents,
            },
            data_cache: tunables.read_cache,
        };
        let chain = Chain::open(record.name.clone(), layers, options)?;
        let keys = chain.keys().into_iter().skip(above);
        let levels = nodes.iter().zip(images).zip(keys);
        let levels = levels.map(|((node, image), key)| Level { node: *node, image, key, closed: false }).collect();
        Ok(Line { chain: Arc::new(chain), levels: Mutex::new(levels) })
    }

    /// Refuses a parent with another CID than its child records, unless this CID was accepted at adoption.
    fn check_parent(&self, child: &Image, parent: &Image, accepted: Option<u32>) -> Result<()> {
        let wanted = child.parent().and_then(|reference| reference.content);
        let (Some(wanted), Some(found)) = (wanted, parent.descriptor()) else { return Ok(()) };
        if found.content == wanted || accepted == Some(found.content.number()) || self.options.force_parent {
            return Ok(());
        }
        let (child, parent) = (child.place().label(), parent.place().label());
        let text = format!(
            "'{child}' was made above content {wanted} of '{parent}', whose content is {} now: the parent was changed or \
             exchanged since; give --force-parent only to save what can be saved",
            found.content
        );
        Err(Error::new(ErrorKind::Corrupt, text))
    }
}
