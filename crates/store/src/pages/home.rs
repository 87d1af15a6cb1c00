//! Writes pages to their places in their files.

use super::{PageFile, PageKey, sealed};
use crate::{IoContext, Result};
use backend::{BLOCK_SIZE, Block, File};
use std::sync::Arc;

/// Writes pages to their files, adjacent ones together, and flushes the files.
pub fn write_home(files: &[Arc<dyn File>; PageFile::COUNT], pages: &[(PageKey, Arc<Block>)]) -> Result<()> {
    let mut touched = [false; PageFile::COUNT];
    let mut at = 0;
    while at < pages.len() {
        let (key, _) = pages[at];
        let mut end = at + 1;
        while end < pages.len()
            && end - at < 512
            && pages[end].0.file() == key.file()
            && pages[end].0.number() == pages[end - 1].0.number() + 1
        {
            end += 1;
        }
        let run: Vec<Block> = pages[at..end].iter().map(|(_, page)| sealed(page)).collect();
        let slices = [bytemuck::cast_slice(&run)];
        let file = &files[key.file() as usize];
        file.write_at(&slices, key.offset(), false).during(|| format!("writing {key} to its place"))?;
        file.write_out(key.offset(), (run.len() * BLOCK_SIZE) as u64, true);
        touched[key.file() as usize] = true;
        at = end;
    }
    for file in PageFile::ALL {
        if touched[file as usize] {
            files[file as usize].sync().during(|| format!("flushing {}", file.name()))?;
        }
    }
    Ok(())
}
