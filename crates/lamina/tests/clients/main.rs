//! Tests of common NBD clients in two generations: the installed versions, and the newest ones in Debian.
//!
//! Each combination of client, style, transport and operation is one line of a matrix, and each failing line is
//! reported. The manual's page on clients has the same table.

#![allow(clippy::unwrap_used)]

mod conformance;
mod guest;
mod libnbd;
mod matrix;
mod operation;
mod own;
mod program;
mod qemu;
mod served;

use matrix::{Line, Matrix};
use operation::Operation::{self, BlockStatus, Cache, FastZero, Fua, Read, Trim, Write, Zero};
use operation::{STYLES, Style};
use program::{GENERATIONS, Generation};
use served::Target;

/// Runs one operation with a client of one generation.
type ClientRun = fn(Generation, &Target, &Line) -> Result<(), String>;

/// Tests a client of both generations, in the style that it requests, with and without TLS.
fn both_generations(program: &str, style: fn(Generation) -> Style, operations: &[Operation], run: ClientRun) {
    generations(program, style, |_| true, operations, run);
}

/// Tests both generations of a client of which only some versions support TLS.
fn generations(
    program: &str,
    style: fn(Generation) -> Style,
    knows_tls: fn(Generation) -> bool,
    operations: &[Operation],
    run: ClientRun,
) {
    let mut matrix = Matrix::new();
    for generation in GENERATIONS {
        let client = format!("{program} {}", generation.version(program));
        let ways = if knows_tls(generation) { &[false, true][..] } else { &[false] };
        for (tls, operation) in ways.iter().flat_map(|tls| operations.iter().map(move |o| (*tls, *o))) {
            let line = Line { client: client.clone(), style: style(generation), tls, operation };
            matrix.line(line, |target, line| run(generation, target, line));
        }
    }
    matrix.finish();
}

/// The operations that QEMU's block layer and nbdkit can request.
const BLOCK_LAYER: [Operation; 6] = [Read, Write, Fua, Trim, Zero, FastZero];

#[test]
fn generations_differ_in_what_they_negotiate() {
    // If both generations negotiated the same style, the matrix below would test one style twice.
    assert_eq!(Generation::Newest.qemu_style(), Style::Extended, "QEMU {}", Generation::Newest.version("qemu-io"));
    assert_eq!(Generation::Newest.libnbd_style(), Style::Extended, "{}", Generation::Newest.version("nbdinfo"));
}

#[test]
fn qemu_io() {
    both_generations("qemu-io", Generation::qemu_style, &BLOCK_LAYER, qemu::io);
}

#[test]
fn qemu_img() {
    both_generations("qemu-img", Generation::qemu_style, &[Read, Write, Zero, BlockStatus], qemu::img);
}

#[test]
fn qemu_nbd_as_a_proxy() {
    let operations = [&BLOCK_LAYER[..], &[BlockStatus]].concat();
    both_generations("qemu-nbd", Generation::qemu_style, &operations, qemu::nbd);
}

#[test]
fn nbdcopy() {
    both_generations("nbdcopy", Generation::libnbd_style, &[Read, Write, Zero], libnbd::nbdcopy);
}

#[test]
fn nbdinfo_and_nbddump() {
    both_generations("nbdinfo", Generation::libnbd_style, &[BlockStatus], libnbd::nbdinfo);
    both_generations("nbddump", Generation::libnbd_style, &[Read], libnbd::nbddump);
}

#[test]
fn nbdfuse() {
    // nbdfuse of libnbd 1.14 refuses a URI that names certificates, so it is not tested with TLS.
    let knows_tls = |generation: Generation| generation.libnbd_style() == Style::Extended;
    generations("nbdfuse", Generation::libnbd_style, knows_tls, &[Read, Write, Trim, Zero], libnbd::nbdfuse);
}

#[test]
fn nbdkit_as_a_proxy() {
    let operations = [&BLOCK_LAYER[..], &[BlockStatus, Cache]].concat();
    both_generations("nbdkit", Generation::libnbd_style, &operations, libnbd::nbdkit);
}

#[test]
fn fio() {
    both_generations("fio", Generation::libnbd_style, &[Read, Write, Trim], libnbd::fio);
}

#[test]
fn libnbd_in_every_style() {
    let operations = [&BLOCK_LAYER[..], &[BlockStatus, Cache]].concat();
    let mut matrix = Matrix::new();
    for generation in GENERATIONS {
        let client = format!("libnbd {}", generation.version("python3"));
        let known = STYLES
            .into_iter()
            .filter(|style| *style != Style::Extended || generation.libnbd_style() == Style::Extended);
        for (style, tls) in known.flat_map(|style| [(style, false), (style, true)]) {
            // Block status requires structured replies.
            let possible = operations.iter().filter(|o| style != Style::Simple || **o != BlockStatus);
            for operation in possible {
                let line = Line { client: client.clone(), style, tls, operation: *operation };
                matrix.line(line, |target, line| libnbd::python(generation, target, line));
            }
        }
    }
    matrix.finish();
}
