//! The snapshots of a disk as a tree of limited width.
//!
//! Chains of thousands of snapshots are common, so a child is not indented under its parent: a snapshot is based on the
//! snapshot above it in the same column. If a snapshot has several children, the one that leads to the head (or else
//! the newest) continues the column. The others are branches: they are printed one column to the right directly below
//! their parent, or below the disk if their common parent was deleted:
//!
//! ```text
//! vm1
//!   install     2026-11-01 10:00:00Z
//!   ├─ test     2026-11-02 10:00:00Z
//!   │  test-2   2026-11-03 10:00:00Z
//!   update      2026-11-04 10:00:00Z
//!   (head)
//! ```

use super::human;
use disk::SnapshotInfo;
use std::collections::HashMap;
use std::io::{self, Write};

/// Depth from which branches are no longer indented.
const DRAWN_DEPTH_MAX: usize = 24;

/// Most clones that a line names; of more clones, the line has only the number.
const CLONES_NAMED_MAX: usize = 3;

/// The content of a line.
enum Step {
    Snapshot { index: usize, depth: usize, first_of_branch: bool },
    Head { depth: usize },
}

/// Prints the snapshots of all disks in the list, in which parents come before their children.
pub fn print(out: &mut dyn Write, snapshots: &[SnapshotInfo]) -> io::Result<()> {
    let mut disks: Vec<(&str, Vec<&SnapshotInfo>)> = Vec::new();
    let mut place: HashMap<&str, usize> = HashMap::new();
    for snapshot in snapshots {
        let at = *place.entry(&snapshot.disk).or_insert_with(|| {
            disks.push((&snapshot.disk, Vec::new()));
            disks.len() - 1
        });
        disks[at].1.push(snapshot);
    }
    for (disk, snapshots) in disks {
        writeln!(out, "{disk}")?;
        let steps = steps(&snapshots);
        let label = |step: &Step| match step {
            Step::Snapshot { index, depth, first_of_branch } => {
                format!("{}{}", rail(*depth, *first_of_branch), snapshots[*index].name)
            }
            Step::Head { depth } => format!("{}(head)", rail(*depth, false)),
        };
        let width = steps.iter().map(|step| label(step).chars().count()).max().unwrap_or(0);
        for step in &steps {
            let text = match step {
                Step::Snapshot { index, .. } => {
                    let snapshot = snapshots[*index];
                    let clones = clones(&snapshot.clones);
                    format!("  {:<width$}  {}{clones}", label(step), human::time(snapshot.created))
                }
                Step::Head { .. } => format!("  {}", label(step)),
            };
            writeln!(out, "{text}")?;
        }
    }
    Ok(())
}

fn rail(depth: usize, first_of_branch: bool) -> String {
    let drawn = depth.min(DRAWN_DEPTH_MAX);
    match (drawn, first_of_branch) {
        (0, _) => String::new(),
        (_, true) => format!("{}├─ ", "│  ".repeat(drawn - 1)),
        (_, false) => "│  ".repeat(drawn),
    }
}

fn clones(names: &[String]) -> String {
    if names.is_empty() {
        return String::new();
    }
    let named = &names[..names.len().min(CLONES_NAMED_MAX)];
    let more = names.len() - named.len();
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("  clones: {}{rest}", named.join(", "))
}

/// The lines in order. The function is iterative, because a chain may be too long for recursion.
fn steps(snapshots: &[&SnapshotInfo]) -> Vec<Step> {
    let index: HashMap<&str, usize> = snapshots.iter().enumerate().map(|(i, s)| (s.name.as_str(), i)).collect();
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); snapshots.len()];
    let mut roots = Vec::new();
    let parents: Vec<Option<usize>> = snapshots
        .iter()
        .enumerate()
        // If the parent is missing or comes after its child, the child is shown at the root.
        .map(|(i, s)| s.parent.as_deref().and_then(|p| index.get(p).copied()).filter(|p| *p < i))
        .collect();
    for (i, parent) in parents.iter().enumerate() {
        match parent {
            Some(parent) => children[*parent].push(i),
            None => roots.push(i),
        }
    }
    let mut leads_to_head = vec![false; snapshots.len()];
    let current = snapshots.iter().position(|s| s.current);
    let mut at = current;
    while let Some(i) = at {
        leads_to_head[i] = true;
        at = parents[i];
    }
    // Pushes siblings so that the branches are popped first, and the snapshot that continues the column last.
    let push = |stack: &mut Vec<Step>, family: &[usize], depth: usize| {
        let trunk = family.iter().copied().max_by_key(|i| (leads_to_head[*i], snapshots[*i].created, *i));
        if let Some(trunk) = trunk {
            stack.push(Step::Snapshot { index: trunk, depth, first_of_branch: false });
        }
        for branch in family.iter().rev().filter(|i| Some(**i) != trunk) {
            stack.push(Step::Snapshot { index: *branch, depth: depth + 1, first_of_branch: true });
        }
    };
    let mut stack = Vec::new();
    let mut out = Vec::new();
    push(&mut stack, &roots, 0);
    while let Some(step) = stack.pop() {
        if let Step::Snapshot { index, depth, .. } = step {
            if Some(index) == current && !children[index].is_empty() {
                // Snapshots are based on the snapshot to which the head belongs: the head continues the column, and
                // these snapshots are printed as branches.
                stack.push(Step::Head { depth });
                for branch in children[index].iter().rev() {
                    stack.push(Step::Snapshot { index: *branch, depth: depth + 1, first_of_branch: true });
                }
            } else {
                if Some(index) == current {
                    stack.push(Step::Head { depth });
                }
                push(&mut stack, &children[index], depth);
            }
        }
        out.push(step);
    }
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn snapshot(disk: &str, name: &str, parent: Option<&str>, created: u64, current: bool) -> SnapshotInfo {
        SnapshotInfo {
            disk: disk.into(),
            name: name.into(),
            capacity: 0,
            parent: parent.map(Into::into),
            clones: Vec::new(),
            current,
            created,
            description: String::new(),
        }
    }

    fn drawn(snapshots: &[SnapshotInfo]) -> String {
        let mut out = Vec::new();
        print(&mut out, snapshots).unwrap();
        let text = String::from_utf8(out).unwrap();
        // All times are equal and have no meaning here, so they are removed.
        text.lines().map(|l| l.replace("1970-01-01 00:00:0", "").trim_end().to_string() + "\n").collect()
    }

    #[test]
    fn branches_are_drawn_beside_the_path_to_the_head() {
        let mut snapshots = vec![
            snapshot("vm1", "install", None, 1, false),
            snapshot("vm1", "test", Some("install"), 2, false),
            snapshot("vm1", "test-2", Some("test"), 3, false),
            snapshot("vm1", "update", Some("install"), 4, true),
            snapshot("vm2", "a", None, 5, true),
        ];
        snapshots[0].clones = ["c1", "c2", "c3", "c4", "c5"].map(String::from).to_vec();
        let expected = "\
vm1
  install    1Z  clones: c1, c2, c3 and 2 more
  ├─ test    2Z
  │  test-2  3Z
  update     4Z
  (head)
vm2
  a       5Z
  (head)
";
        assert_eq!(drawn(&snapshots), expected);
    }

    #[test]
    fn after_a_revert_the_newer_snapshots_are_a_branch() {
        let snapshots = [
            snapshot("vm1", "a", None, 1, true),
            snapshot("vm1", "b", Some("a"), 2, false),
            snapshot("vm1", "c", Some("b"), 3, false),
        ];
        assert_eq!(drawn(&snapshots), "vm1\n  a       1Z\n  ├─ b    2Z\n  │  c    3Z\n  (head)\n");
    }

    #[test]
    fn every_snapshot_of_any_tree_is_drawn_once_and_after_its_parent() {
        let mut state = 3u64;
        let mut next = move |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for round in 0..500 {
            let count = 1 + next(40);
            let head = next(count);
            let mut snapshots = Vec::new();
            for i in 0..count {
                let parent = (i > 0 && next(8) > 0).then(|| format!("s{}", next(i)));
                snapshots.push(snapshot("d", &format!("s{i}"), parent.as_deref(), next(100) as u64, i == head));
            }
            let listed: Vec<&SnapshotInfo> = snapshots.iter().collect();
            let order: Vec<usize> = steps(&listed)
                .iter()
                .filter_map(|step| match step {
                    Step::Snapshot { index, .. } => Some(*index),
                    Step::Head { .. } => None,
                })
                .collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.iter().copied().eq(0..count), "round {round}");
            for (place, index) in order.iter().enumerate() {
                if let Some(parent) = &snapshots[*index].parent {
                    assert!(order[..place].iter().any(|i| snapshots[*i].name == *parent), "round {round}");
                }
            }
        }
    }

    #[test]
    fn trees_of_ten_thousand_snapshots_are_drawn_narrowly() {
        for fork in [false, true] {
            let mut snapshots = vec![snapshot("d", "s0", None, 0, false)];
            for i in 1..10_000usize {
                let parent = format!("s{}", i - 1);
                // The branch is the older child, and it is extended by one snapshot each time.
                snapshots.push(snapshot("d", &format!("s{i}"), Some(&parent), 0, false));
                if fork {
                    snapshots.push(snapshot("d", &format!("t{i}"), Some(&parent), 9, false));
                }
            }
            let text = drawn(&snapshots);
            assert!(text.lines().all(|l| l.chars().count() < 120));
        }
    }
}
