//! Nodes of arbitrary bytes as a tree: every operation must handle nodes that pass validation, even if they contradict
//! each other.

#![no_main]

use backend::Block;
use error::{Error, ErrorKind, Result};
use lamina_fuzz::Input;
use libfuzzer_sys::fuzz_target;
use store::tree::{self, LOGICAL_LIMIT, NodeId, NodeStore};

/// The number of nodes in the input, and the most nodes after changes.
const NODES: usize = 8;
const NODES_MAX: usize = 400;

struct Nodes {
    pages: Vec<Option<(Block, u32)>>,
}

fn refused(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

impl Nodes {
    fn slot(&mut self, id: NodeId) -> Result<&mut (Block, u32)> {
        self.pages.get_mut(id.0 as usize).and_then(Option::as_mut).ok_or_else(|| refused("no such node"))
    }
}

impl NodeStore for Nodes {
    fn node(&mut self, id: NodeId) -> Result<&Block> {
        let (page, _) = self.slot(id)?;
        tree::validate(page, id)?;
        Ok(page)
    }
    fn node_mut(&mut self, id: NodeId) -> Result<&mut Block> {
        Ok(&mut self.slot(id)?.0)
    }
    fn allocate(&mut self) -> Result<NodeId> {
        if self.pages.len() == NODES_MAX {
            return Err(Error::new(ErrorKind::NoSpace, "enough nodes"));
        }
        self.pages.push(Some((Block([0; 4096]), 1)));
        Ok(NodeId(self.pages.len() as u64 - 1))
    }
    fn references(&mut self, id: NodeId) -> Result<u32> {
        Ok(self.slot(id)?.1)
    }
    fn add_reference(&mut self, id: NodeId) -> Result<()> {
        self.slot(id)?.1 += 1;
        Ok(())
    }
    fn drop_reference(&mut self, id: NodeId) -> Result<u32> {
        let (_, references) = self.slot(id)?;
        *references -= 1;
        let left = *references;
        if left == 0 {
            self.pages[id.0 as usize] = None;
        }
        Ok(left)
    }
    fn add_data_references(&mut self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }
    fn drop_data_references(&mut self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }
}

fn page(input: &mut Input<'_>, id: u64) -> Block {
    let mut page = Block([0; 4096]);
    page.0[..4].copy_from_slice(b"LMND");
    page.0[4] = 1;
    page.0[16..24].copy_from_slice(&id.to_le_bytes());
    let shape = input.u8();
    if shape & 0x80 != 0 {
        // Raw bytes of the input.
        let length = input.word(2) as usize % 4096;
        let bytes = input.bytes(length);
        page.0[..bytes.len()].copy_from_slice(bytes);
        return page;
    }
    // Mostly ascending entries: most pages are valid, and refer to each other.
    let level = shape % 4;
    page.0[6] = level;
    let count = input.u8() as usize % 255;
    page.0[8] = count as u8;
    let mut key = 0;
    for i in 0..count {
        let (step, target, length) = (input.word(2), input.word(2), input.word(1));
        let [first, second] = if level == 0 {
            let entry = [key + step | length << 40, target | (step & 1) << 63];
            key += step + length + 1;
            entry
        } else {
            key = if i == 0 { 0 } else { key + step + 1 };
            [key, target % NODES as u64]
        };
        let at = 32 + 16 * i;
        page.0[at..at + 8].copy_from_slice(&first.to_le_bytes());
        page.0[at + 8..at + 16].copy_from_slice(&second.to_le_bytes());
    }
    page
}

/// Whether a tree keeps its bounds and reaches each of its nodes by only one path.
fn is_sound(nodes: &mut Nodes, root: NodeId) -> bool {
    let mut seen = std::collections::BTreeSet::new();
    let mut once = true;
    let walked = tree::walk(nodes, root, &mut |visit| {
        if let tree::Visit::Node { id, .. } = visit {
            once &= seen.insert(id.0);
        }
        Ok(once)
    });
    walked.is_ok() && once
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let pages = (0..NODES as u64)
        .map(|id| {
            let references = 1 + u32::from(input.u8() % 3);
            Some((page(&mut input, id), references))
        })
        .collect();
    let mut nodes = Nodes { pages };
    let (mut one, other) = (NodeId(0), NodeId(1));
    for _ in 0..16 {
        let start = input.word(4);
        let range = start..(start + 1 + input.word(2)).min(LOGICAL_LIMIT);
        let mut extents = Vec::new();
        match input.u8() % 6 {
            0 => {
                if tree::lookup(&mut nodes, one, range.clone(), &mut extents).is_ok() {
                    let mut at = range.start;
                    for extent in extents {
                        assert!(extent.logical >= at && extent.blocks > 0);
                        at = extent.logical + extent.blocks;
                    }
                    assert!(at <= range.end);
                }
            }
            1 => drop(tree::lookup_exclusive(&mut nodes, one, range, &mut extents)),
            2 => {
                let with = Some((input.word(6), input.u8() & 1 == 1));
                let sound = is_sound(&mut nodes, one);
                match tree::replace(&mut nodes, one, range.clone(), with) {
                    Ok(root) => {
                        one = root;
                        // In a tree that was sound before, a later lookup may fail on the damage of other trees, but
                        // never return another mapping for this range.
                        if sound && tree::lookup(&mut nodes, one, range.clone(), &mut extents).is_ok() {
                            let mapped: u64 = extents.iter().map(|extent| extent.blocks).sum();
                            assert_eq!(mapped, range.end - range.start);
                        }
                    }
                    // After an error the tree is half changed and must not be used, as the documentation of the tree
                    // says.
                    Err(_) => return,
                }
            }
            3 => match tree::replace(&mut nodes, one, range, None) {
                Ok(root) => one = root,
                Err(_) => return,
            },
            4 => drop(tree::diff(&mut nodes, Some(one), Some(other), range, &mut |_| Ok(()))),
            _ => {
                let mut visits = 0;
                let _ = tree::walk(&mut nodes, one, &mut |_| {
                    visits += 1;
                    Ok(visits < 10_000)
                });
            }
        }
    }
    let mut root = Some(one);
    for _ in 0..1000 {
        if root.is_none() || tree::drop_step(&mut nodes, &mut root, 8).is_err() {
            break;
        }
    }
});
