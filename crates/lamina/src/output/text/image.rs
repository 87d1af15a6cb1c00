//! Images as text.

use crate::output::human::{count, size};
use crate::output::printable::printable;
use crate::output::table::print_facts;
use crate::output::text::salvage::{print_lost, summed};
use disk::convert::Converted;
use disk::images::{ImageCheck, ImageInfo, ImageLevel};
use std::io::{self, Write};

/// Size of the blocks in which VMware counts the space of flat disks.
const FILE_BLOCK: u64 = 1 << 20;

/// Most extents of an image that are listed.
const EXTENTS_TOLD_MAX: usize = 4;

/// Prints an image and its parents, newest first.
pub fn print(out: &mut dyn Write, info: &ImageInfo) -> io::Result<()> {
    for (number, level) in info.levels.iter().enumerate() {
        if number > 0 {
            writeln!(out)?;
        }
        print_facts(out, &facts(level))?;
    }
    match &info.problem {
        Some(problem) => writeln!(out, "\nproblem: {}", printable(problem)),
        None => Ok(()),
    }
}

fn facts(level: &ImageLevel) -> Vec<(&'static str, String)> {
    let blocks = |blocks: u64| format!("{blocks} ({})", size(blocks.saturating_mul(FILE_BLOCK)));
    let mut facts = vec![("image", level.path.clone()), ("format", level.format.clone())];
    facts.extend(level.create_type.clone().map(|name| ("create type", name)));
    facts.push(("capacity", format!("{} ({} bytes)", size(level.capacity), level.capacity)));
    facts.push(("allocated", size(level.allocated)));
    facts.push(("holds", size(level.mapped)));
    if level.dead > 0 {
        facts.push(("dead", format!("{} (shrinking returns it)", size(level.dead))));
    }
    if level.internal_snapshots > 0 {
        facts.push(("internal snapshots", format!("{} (not read)", level.internal_snapshots)));
    }
    facts.extend(level.provisioning.clone().map(|name| ("provisioning", name)));
    facts.extend(level.blocks_allocated.map(|n| ("blocks allocated", blocks(n))));
    facts.extend(level.blocks_to_be_zeroed.map(|n| ("blocks to be zeroed", blocks(n))));
    facts.extend(level.fragments.map(|n| ("fragments", n.to_string())));
    facts.extend(level.content_id.clone().map(|id| ("content", id)));
    facts.extend(level.parent_content_id.clone().map(|id| ("parent's content", id)));
    facts.extend(level.parent.clone().map(|hint| ("parent", hint)));
    facts.extend(level.adapter.clone().map(|name| ("adapter", name)));
    facts.extend(level.uuid.clone().map(|id| ("uuid", id)));
    let extents: Vec<String> = level
        .extents
        .iter()
        .take(EXTENTS_TOLD_MAX)
        .map(|extent| {
            let file = extent.file.as_deref().unwrap_or("-");
            format!("{file} ({}, {})", extent.kind, size(extent.length))
        })
        .collect();
    if !extents.is_empty() {
        let more = match level.extents.len() - extents.len() {
            0 => String::new(),
            more => format!(", and {}", count(more as u64, "more extent")),
        };
        facts.push(("extents", format!("{}{more}", extents.join(", "))));
    }
    facts
}

/// Prints the findings of a check.
pub fn print_check(out: &mut dyn Write, check: &ImageCheck) -> io::Result<()> {
    for finding in &check.findings {
        let file = if finding.image.ends_with(&finding.file) {
            finding.image.clone()
        } else {
            format!("{} ({})", finding.image, finding.file)
        };
        let file = printable(&file);
        for problem in &finding.problems {
            writeln!(out, "{file}: {}", printable(problem))?;
        }
        for note in &finding.notes {
            writeln!(out, "{file}: note: {}", printable(note))?;
        }
        if finding.dead > 0 {
            writeln!(out, "{file}: {} to which no table refers", size(finding.dead))?;
        }
    }
    if check.repaired > 0 {
        writeln!(out, "{} repaired", count(check.repaired, "problem"))?;
    }
    match check.problems {
        0 => writeln!(out, "clean"),
        found => writeln!(out, "{}", count(found, "problem")),
    }
}

/// Prints a new image.
pub fn print_created(out: &mut dyn Write, level: &ImageLevel) -> io::Result<()> {
    let above = match &level.parent {
        Some(parent) => format!(", above {parent}"),
        None => String::new(),
    };
    writeln!(out, "created {}: {}, {}{above}", level.path, size(level.capacity), level.format)
}

/// Prints the result of a conversion.
pub fn print_converted(out: &mut dyn Write, made: &Converted) -> io::Result<()> {
    for warning in &made.warnings {
        writeln!(out, "warning: {}", printable(warning))?;
    }
    print_lost(out, &made.lost)?;
    write!(out, "made {}: {}, {}, {} of data", made.target, made.format, size(made.capacity), size(made.copied))?;
    match made.lost.is_empty() {
        true => writeln!(out),
        false => writeln!(out, "; {}", summed(&made.lost)),
    }
}
