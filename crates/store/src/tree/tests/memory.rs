//! A store in plain memory with real reference counts.
//!
//! With `strict` the store panics when the tree breaks the contract: uses a free page, changes a page that has two
//! references, lowers a count below zero, or refers to free data. Without `strict` it models a damaged datastore: pages
//! are validated at each load, and every violation is an error. `fail_in` is the number of calls after which one fails.

use crate::FILE_BLOCKS;
use crate::tree::{LOGICAL_LIMIT, NodeId, NodeStore, Visit, corrupt, page, validate, walk};
use crate::{Error, ErrorKind, Result};
use backend::{BLOCK_SIZE, Block};
use std::collections::{BTreeMap, HashMap};

#[derive(Clone)]
pub struct Memory {
    pages: Vec<Option<Box<Block>>>,
    references: Vec<u32>,
    free: Vec<u64>,
    data: Vec<u32>,
    pub strict: bool,
    /// Whether shared leaves may change, as when blocks are packed.
    pub packing: bool,
    pub fail_in: Option<u64>,
    /// Number of calls of `node` and `node_mut`.
    pub loads: u64,
    /// Number of calls of `allocate`.
    pub allocations: u64,
}

impl Memory {
    pub fn new() -> Self {
        Self {
            pages: Vec::new(),
            references: Vec::new(),
            free: Vec::new(),
            data: Vec::new(),
            strict: true,
            packing: false,
            fail_in: None,
            loads: 0,
            allocations: 0,
        }
    }

    /// Allocates new data blocks after all others, each with one reference.
    pub fn allocate_data(&mut self, blocks: u64) -> u64 {
        while self.data.len() as u64 % FILE_BLOCKS + blocks > FILE_BLOCKS {
            self.skip_data();
        }
        let physical = self.data.len() as u64;
        self.data.resize(self.data.len() + blocks as usize, 1);
        physical
    }

    /// Leaves a gap, so that the next data blocks are not adjacent to the last.
    pub fn skip_data(&mut self) {
        self.data.push(0);
    }

    pub fn live_pages(&self) -> usize {
        self.pages.iter().flatten().count()
    }

    pub fn live_data(&self) -> usize {
        self.data.iter().filter(|count| **count > 0).count()
    }

    pub fn page(&self, id: NodeId) -> &Block {
        self.pages[id.0 as usize].as_deref().expect("a live page")
    }

    pub fn page_mut(&mut self, id: NodeId) -> &mut Block {
        self.pages[id.0 as usize].as_deref_mut().expect("a live page")
    }

    pub fn live_ids(&self) -> Vec<NodeId> {
        (0..self.pages.len()).filter(|i| self.pages[*i].is_some()).map(|i| NodeId(i as u64)).collect()
    }

    /// A hash of all bytes of all pages and of all counts.
    pub fn fingerprint(&self) -> u64 {
        use std::hash::{Hash, Hasher};
        let mut hasher = std::collections::hash_map::DefaultHasher::new();
        for page in &self.pages {
            page.as_ref().map(|page| page.0).hash(&mut hasher);
        }
        (&self.references, &self.free, &self.data).hash(&mut hasher);
        hasher.finish()
    }

    /// Checks that every page reachable from `roots` is valid, that every count equals the references in the trees, and
    /// that no other page is allocated.
    pub fn verify(&mut self, roots: &[NodeId]) {
        let mut nodes: BTreeMap<NodeId, u32> = BTreeMap::new();
        let mut data: HashMap<u64, u32> = HashMap::new();
        for root in roots {
            walk(self, *root, &mut |visit| {
                Ok(match visit {
                    Visit::Node { id, .. } => {
                        let count = nodes.entry(id).or_default();
                        *count += 1;
                        *count == 1
                    }
                    Visit::Extent(extent) => {
                        let stored = extent.stored();
                        for block in stored.physical..stored.physical + stored.blocks {
                            *data.entry(block).or_default() += 1;
                        }
                        true
                    }
                })
            })
            .unwrap();
        }
        for id in self.live_ids() {
            let page = self.page(id);
            validate(page, id).unwrap();
            assert_eq!(nodes.get(&id), Some(&self.references[id.0 as usize]), "references of node {id}");
            assert!(roots.contains(&id) || page::count(page) > 0, "node {id} is empty");
        }
        assert_eq!(nodes.len(), self.live_pages(), "every node reachable is alive");
        for (block, count) in self.data.iter().enumerate() {
            assert_eq!(*count, data.get(&(block as u64)).copied().unwrap_or(0), "references of data block {block}");
        }
    }

    fn call(&mut self) -> Result<()> {
        match &mut self.fail_in {
            Some(0) => Err(Error::new(ErrorKind::Io, "as asked by the test")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn load(&mut self, id: NodeId) -> Result<&mut Block> {
        self.call()?;
        self.loads += 1;
        match self.pages.get_mut(id.0 as usize).and_then(Option::as_deref_mut) {
            Some(page) => {
                if !self.strict {
                    validate(page, id)?;
                }
                Ok(page)
            }
            None if self.strict => panic!("node {id} is used after it was freed"),
            None => Err(corrupt(id, "it is free")),
        }
    }

    fn count(&mut self, id: NodeId) -> Result<&mut u32> {
        self.call()?;
        match self.references.get_mut(id.0 as usize) {
            Some(count) if *count > 0 => Ok(count),
            _ if self.strict => panic!("references of node {id}, which is free"),
            _ => Err(corrupt(id, "it is free")),
        }
    }

    /// The references of data blocks.
    pub fn data(&mut self, blocks: std::ops::Range<u64>) -> Result<&[u32]> {
        self.call()?;
        let none = || Error::new(ErrorKind::Corrupt, "no such data blocks");
        self.data.get(blocks.start as usize..blocks.end as usize).ok_or_else(none)
    }

    fn change_data(&mut self, physical: u64, blocks: u64, change: i32) -> Result<()> {
        self.call()?;
        assert!(blocks > 0);
        let range = physical as usize..(physical + blocks) as usize;
        let Some(counts) = self.data.get_mut(range) else {
            assert!(!self.strict, "data blocks that were never allocated");
            return Err(Error::new(ErrorKind::Corrupt, "no such data blocks"));
        };
        for count in counts {
            assert!(*count > 0 || !self.strict, "a data block of {physical} is used after it was freed");
            *count = count.saturating_add_signed(change);
        }
        Ok(())
    }
}

impl NodeStore for Memory {
    fn node(&mut self, id: NodeId) -> Result<&Block> {
        self.load(id).map(|page| &*page)
    }

    fn node_mut(&mut self, id: NodeId) -> Result<&mut Block> {
        let shared = self.references.get(id.0 as usize).is_some_and(|count| *count > 1) && !self.packing;
        assert!(!shared || !self.strict, "node {id} is changed while shared");
        // The page may be new and still empty, so it is not validated.
        self.call()?;
        self.loads += 1;
        match self.pages.get_mut(id.0 as usize).and_then(Option::as_deref_mut) {
            Some(page) => Ok(page),
            None if self.strict => panic!("node {id} is changed after it was freed"),
            None => Err(corrupt(id, "it is free")),
        }
    }

    fn allocate(&mut self) -> Result<NodeId> {
        self.call()?;
        self.allocations += 1;
        let id = self.free.pop().unwrap_or(self.pages.len() as u64);
        if id as usize == self.pages.len() {
            self.pages.push(None);
            self.references.push(0);
        }
        self.pages[id as usize] = Some(Box::new(Block([0; BLOCK_SIZE])));
        self.references[id as usize] = 1;
        Ok(NodeId(id))
    }

    fn references(&mut self, id: NodeId) -> Result<u32> {
        self.count(id).map(|count| *count)
    }

    fn add_reference(&mut self, id: NodeId) -> Result<()> {
        *self.count(id)? += 1;
        Ok(())
    }

    fn drop_reference(&mut self, id: NodeId) -> Result<u32> {
        let count = self.count(id)?;
        *count -= 1;
        let left = *count;
        if left == 0 {
            self.pages[id.0 as usize] = None;
            self.free.push(id.0);
        }
        Ok(left)
    }

    fn add_data_references(&mut self, physical: u64, blocks: u64) -> Result<()> {
        self.change_data(physical, blocks, 1)
    }

    fn drop_data_references(&mut self, physical: u64, blocks: u64) -> Result<()> {
        self.change_data(physical, blocks, -1)
    }
}

/// All blocks that a tree maps: (logical, (physical, unwritten)).
pub fn content(store: &mut Memory, root: NodeId) -> Vec<(u64, (u64, bool))> {
    let mut out = Vec::new();
    crate::tree::lookup(store, root, 0..LOGICAL_LIMIT, &mut out).unwrap();
    let blocks = |e: &crate::tree::Extent| {
        let extent = *e;
        (0..extent.blocks).map(move |i| (extent.logical + i, (extent.physical + i, extent.unwritten)))
    };
    out.iter().flat_map(blocks).collect()
}
