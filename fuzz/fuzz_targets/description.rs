//! The description of a machine of another program: a configuration of VMware, an OVF descriptor, settings of
//! VirtualBox, the XML of a libvirt domain. A machine that is made of one has a consistent definition.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vm::import::plan::plan;
use vm::import::{Format, Options, parse};

fuzz_target!(|data: &[u8]| {
    let Some((first, text)) = data.split_first() else { return };
    let format = [Format::Vmx, Format::Ovf, Format::Libvirt, Format::Vbox][usize::from(first % 4)];
    let Ok(machines) = parse(format, text) else { return };
    let options = Options::default();
    for machine in machines {
        if let Ok(plan) = plan(machine, &options) {
            plan.definition.check().expect("a plan has a consistent definition");
            assert_eq!(plan.disks.len(), plan.definition.disks.len());
        }
    }
});
