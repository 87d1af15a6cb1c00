//! Requests about scrubs.

use super::Service;
use crate::message::{Change, Reply, ScrubRequest};
use ::disk::{Progress, ScrubDamage, ScrubOptions};
use error::Result;

/// Most events for damage that is found at once; one more event has the number of the other places.
const EVENTS_MAX: usize = 64;

/// Carries out a request.
pub fn dispatch(service: &Service, request: ScrubRequest, progress: &dyn Progress) -> Result<Reply> {
    let datastore = &service.datastore;
    Ok(match request {
        ScrubRequest::Start { rate, restart } => {
            let tell = |damage: &[ScrubDamage]| service.publish(|| changes(damage));
            Reply::Scrub(Box::new(datastore.scrub(ScrubOptions { rate, restart }, &tell, progress)?))
        }
        ScrubRequest::Status => Reply::Scrub(Box::new(datastore.scrub_report(progress)?)),
        ScrubRequest::Cancel => Reply::ScrubState(Box::new(datastore.cancel_scrub()?)),
        ScrubRequest::Schedule { every, rate } => Reply::ScrubState(Box::new(datastore.schedule_scrubs(every, rate)?)),
    })
}

fn changes(damage: &[ScrubDamage]) -> Vec<Change> {
    let listed = damage.iter().take(EVENTS_MAX).map(|damage| Change::DamageFound {
        problem: damage.problem.clone(),
        repaired: damage.repaired.clone(),
        objects: damage.disk.iter().chain(damage.references.iter().map(|reference| &reference.name)).cloned().collect(),
    });
    let mut changes: Vec<Change> = listed.collect();
    let more = damage.len() - changes.len();
    if more > 0 {
        let problem = format!("{more} more damaged places: 'lamina scrub status' lists them");
        changes.push(Change::DamageFound { problem, repaired: None, objects: Vec::new() });
    }
    changes
}
