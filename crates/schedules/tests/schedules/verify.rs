//! Compares a store after a power cut with its model.

use crate::control::read_snapshot;
use crate::model::{Fate, Image, Model, Object};
use crate::store::{Statistics, check, count};
use backend::simulated::SimulatedDisk;
use scheduled_store::catalog::ObjectState;
use scheduled_store::engine::Head;
use scheduled_store::{Engine, EngineOptions};
use std::collections::BTreeMap;
use std::sync::Arc;
use testkit::Random;

/// Opens the store after a power cut, at times with another power cut during opening, and compares all of it with the
/// model. Then opens it once more: the content must be the same.
pub fn after_cut(
    mut disk: SimulatedDisk,
    mut model: Model,
    options: EngineOptions,
    random: &mut Random,
    statistics: &Statistics,
) -> Result<(), String> {
    let options = EngineOptions { threads: false, ..options };
    settle_snapshots_under_way(&mut model);
    for _ in 0..2 {
        disk = disk.crash();
        if random.percent(20) {
            disk.cut_after(disk.operations() + crate::schedule::scaled(random, 6));
            let opened = Engine::open(disk.directory(), options);
            if !disk.is_off() {
                opened.map_err(|error| format!("opening: {error}"))?;
            } else {
                count(&statistics.cut_openings);
            }
            disk = disk.crash();
        }
        let engine = Engine::open(disk.directory(), options).map_err(|error| format!("opening: {error}"))?;
        compare(&engine, &mut model)?;
        check(&engine)?;
    }
    Ok(())
}

/// Like [`after_cut`], for a store that was closed: all acknowledged writes must be there.
pub fn after_close(disk: SimulatedDisk, mut model: Model, options: EngineOptions) -> Result<(), String> {
    let covered = model.covered();
    model.flushed(&covered);
    let disk = disk.crash();
    let options = EngineOptions { threads: false, ..options };
    let engine = Engine::open(disk.directory(), options).map_err(|error| format!("opening: {error}"))?;
    compare(&engine, &mut model)?;
    check(&engine)
}

/// A snapshot that was being taken at the power cut may have any content that its disk may have.
fn settle_snapshots_under_way(model: &mut Model) {
    let disks: BTreeMap<String, Image> =
        model.objects.iter().map(|(name, object)| (name.clone(), object.image.clone())).collect();
    for object in model.objects.values_mut().filter(|object| matches!(object.fate, Fate::Coming)) {
        if let Some(disk) = object.of.as_ref().and_then(|disk| disks.get(disk)) {
            object.image.catch_up(disk);
        }
    }
}

/// Compares the store with the model. From now on the model allows only the content found.
fn compare(engine: &Arc<Engine>, model: &mut Model) -> Result<(), String> {
    let found: BTreeMap<String, (u64, bool)> = engine.with_catalog(|catalog| {
        let objects = catalog.objects().filter(|object| object.state != ObjectState::Trash);
        objects.map(|object| (object.name.clone(), (object.id, object.is_snapshot()))).collect()
    });
    if let Some(name) = found.keys().find(|name| !model.objects.contains_key(*name)) {
        return Err(format!("{name} is there, and was deleted or never made"));
    }
    let titles: Vec<String> = model.objects.keys().cloned().collect();
    for name in titles {
        let Some(mut object) = model.objects.remove(&name) else { continue };
        let Some(&(id, is_snapshot)) = found.get(&name) else {
            if matches!(object.fate, Fate::Coming | Fate::Going) {
                continue;
            }
            return Err(format!("{name} is gone"));
        };
        if is_snapshot != object.of.is_some() {
            return Err(format!("{name} has become a disk or a snapshot"));
        }
        object.id = id;
        let found = match is_snapshot {
            true => read_snapshot(engine, &name, id, &object.image),
            false => read_disk(engine, &engine.head(id), &name, &object.image),
        };
        let found = found.map_err(|error| format!("reading {name} of {:?}: {error}", object.of))?;
        settle(&mut object, &found).map_err(|violation| format!("{name} of {:?}: {violation}", object.of))?;
        model.objects.insert(name, object);
    }
    Ok(())
}

fn settle(object: &mut Object, found: &[u8]) -> Result<(), String> {
    let fate = std::mem::replace(&mut object.fate, Fate::Stays);
    let floors = object.image.floors();
    let mut judged = object.image.clone();
    let mut outcome = judged.judge(0, found, &floors, true);
    if let (Err(violation), Fate::Becoming(image)) = (&mut outcome, fate) {
        judged = image;
        let floors = judged.floors();
        outcome = judged.judge(0, found, &floors, true).map_err(|other| format!("{violation}; or reverted: {other}"));
    }
    outcome?;
    object.image = judged;
    object.image.pin();
    Ok(())
}

fn read_disk(engine: &Engine, head: &Head, name: &str, image: &Image) -> error::Result<backend::Buffer> {
    let blocks = (image.sectors.len() / crate::model::SECTORS) as u64;
    engine.read_blocks(name, 0..blocks, &|range| engine.plan_head(head, range))
}
