//! Arguments that choose the controller of all disks of a machine, and the model of all its network cards.

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use vm::definition::{Bus, Card};

/// The hardware by which disks and network cards are attached.
#[derive(Debug, Args)]
pub struct DeviceArguments {
    /// Attach all disks and network cards by virtio, for a guest that has the drivers.
    #[arg(long, conflicts_with_all = ["bus", "card"])]
    virtio: bool,
    /// Controller of all disks, except those in ports. Default: the controllers are not changed.
    #[arg(long, value_name = "BUS", value_parser = buses())]
    bus: Option<Bus>,
    /// Model of all network cards. Default: the models are not changed.
    #[arg(long, value_name = "MODEL", value_parser = cards())]
    card: Option<Card>,
}

impl DeviceArguments {
    /// The controller of all disks, if one is chosen.
    pub fn bus(&self) -> Option<Bus> {
        if self.virtio { Some(Bus::Virtio) } else { self.bus }
    }

    /// The model of all network cards, if one is chosen.
    pub fn card(&self) -> Option<Card> {
        if self.virtio { Some(Card::Virtio) } else { self.card }
    }
}

fn buses() -> impl TypedValueParser<Value = Bus> {
    let values = Bus::ALL.map(|bus| PossibleValue::new(bus.name()).help(bus.description()));
    PossibleValuesParser::new(values)
        .try_map(|name| Bus::ALL.into_iter().find(|bus| bus.name() == name).ok_or("no such controller"))
}

fn cards() -> impl TypedValueParser<Value = Card> {
    let values = Card::ALL.map(|card| PossibleValue::new(card.name()).help(card.description()));
    PossibleValuesParser::new(values)
        .try_map(|name| Card::ALL.into_iter().find(|card| card.name() == name).ok_or("no such model"))
}
