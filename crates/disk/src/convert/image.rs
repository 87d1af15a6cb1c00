//! Sinks that are images.

use super::copy::{Pieces, Sink};
use backend::IoMode;
use error::{ErrorKind, Result};
use layer::image::create::{ImageKind, NewImage, Unfinished, begin};
use layer::image::{Folder, Image, OpenOptions, system_entropy};
use layer::{Content, Extent, Layer};
use std::sync::Arc;
use work::Progress;
use work::Unreported;

/// The most extents of a part for which write-back is started early. Further extents are written back by the flush.
const WRITE_OUT_EXTENTS: usize = 64;

/// An image under its temporary name.
pub(super) struct ImageSink {
    unfinished: Unfinished,
    image: Image,
    kind: ImageKind,
    /// The new image's layer, and the extents that its map returned for the part written last.
    layer: Arc<dyn Layer>,
    extents: Vec<Extent>,
}

impl ImageSink {
    /// Creates the empty image.
    pub(super) fn new(
        folder: &Folder,
        name: &str,
        kind: ImageKind,
        capacity: u64,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let random = system_entropy();
        // The copy writes zeros only to ranges without data, after all data is written.
        let made = match kind {
            ImageKind::EagerZeroedThick => ImageKind::ZeroedThick,
            kind => kind,
        };
        let new = NewImage { mode: IoMode::Buffered, ..NewImage::new(name, capacity, made) };
        let unfinished = begin(folder, &new, &mut || random(), &Unreported(progress))?;
        match unfinished.open(&OpenOptions { writable: true, ..OpenOptions::default() }) {
            Ok(image) => {
                let layer = Arc::clone(image.layer());
                Ok(Self { unfinished, image, kind, layer, extents: Vec::new() })
            }
            Err(error) => {
                unfinished.abandon();
                Err(error)
            }
        }
    }

    /// Makes the kernel start the writeback of the data, so that the flush at the end has less to write.
    fn write_out(&mut self, start: u64, length: u64) -> Result<()> {
        self.extents.clear();
        self.layer.map(start..start + length, WRITE_OUT_EXTENTS, &mut self.extents)?;
        for extent in &self.extents {
            if let Content::Data { file, offset } = extent.content {
                self.layer.file(file)?.write_out(offset, extent.length, false);
            }
        }
        Ok(())
    }

    fn close(&self, progress: &dyn Progress) -> Result<()> {
        if self.kind == ImageKind::EagerZeroedThick {
            self.image.inflate(progress)?;
        }
        self.layer.close()
    }
}

impl Sink for ImageSink {
    fn unit(&self) -> u64 {
        self.layer.grain()
    }

    fn fill(&mut self, pieces: &mut Pieces<'_>) -> Result<()> {
        let mut take = |piece: &super::CopyPiece| {
            for run in &piece.runs {
                let start = piece.start + run.start as u64;
                self.layer.write(start, &[piece.bytes(run)])?;
                self.write_out(start, run.len() as u64)?;
            }
            Ok(())
        };
        while pieces.next(&mut take)? {}
        Ok(())
    }

    fn finish(self: Box<Self>, progress: &dyn Progress) -> Result<()> {
        let closed = self.close(progress);
        let Self { unfinished, image, layer, .. } = *self;
        drop((image, layer));
        match closed {
            Ok(()) => unfinished.finish().map(drop),
            Err(error) => {
                unfinished.abandon();
                match error.kind() {
                    ErrorKind::Interrupted => Err(error::Error::new(
                        ErrorKind::Interrupted,
                        "the conversion was stopped; nothing of the target is left",
                    )),
                    _ => Err(error),
                }
            }
        }
    }

    fn abandon(self: Box<Self>) {
        let Self { unfinished, image, layer, .. } = *self;
        drop((image, layer));
        unfinished.abandon();
    }
}
