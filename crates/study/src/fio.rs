//! Runs fio on an NBD export and parses its output.
//!
//! On two cores with the fastest server, fio's own threads use about half a core, so the servers are the bottleneck and
//! not fio.

use crate::error::{Doing, Error, Result};
use crate::process;
use crate::scratch::Scratch;
use serde::Serialize;
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// Time that a run may take in addition to its planned duration.
const GRACE: Duration = Duration::from_secs(120);

/// Address of an export.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Unix socket.
    pub socket: PathBuf,
    /// Export name; empty for the default export.
    pub export: String,
}

impl Endpoint {
    /// The address as an NBD URI.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///{}?socket={}", self.export, self.socket.display())
    }
}

/// Pattern of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Pattern {
    /// Random reads.
    RandomRead,
    /// Random writes.
    RandomWrite,
    /// Sequential reads, repeated from the beginning.
    Read,
    /// Sequential writes, repeated from the beginning.
    Write,
}

impl Pattern {
    /// Whether the pattern changes the disk.
    pub fn writes(self) -> bool {
        matches!(self, Pattern::RandomWrite | Pattern::Write)
    }

    /// Whether the order of the requests is random.
    pub fn random(self) -> bool {
        matches!(self, Pattern::RandomRead | Pattern::RandomWrite)
    }

    fn word(self) -> &'static str {
        match self {
            Pattern::RandomRead => "randread",
            Pattern::RandomWrite => "randwrite",
            Pattern::Read => "read",
            Pattern::Write => "write",
        }
    }
}

/// Length of a run.
#[derive(Clone, Copy, Debug, Serialize)]
pub enum Length {
    /// A fixed time after a ramp that is not counted. Random offsets may repeat.
    Time {
        /// Counted seconds.
        seconds: f64,
        /// Seconds of the ramp.
        ramp: f64,
    },
    /// A fixed number of bytes, in which no block is used twice, and a flush at the end.
    Bytes(u64),
}

/// One run of fio.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Job {
    /// Pattern of the requests.
    pub pattern: Pattern,
    /// Bytes of each request.
    pub block: u32,
    /// Requests in flight.
    pub depth: u32,
    /// Whether a flush follows each write.
    pub flush_each: bool,
    /// Length of the run.
    pub length: Length,
    /// Bytes of the disk to use, from offset 0.
    pub size: u64,
    /// Seed of the offsets. Every side of a comparison has the same seed.
    pub seed: u64,
}

/// Result of a run.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sample {
    /// Requests per second.
    pub rate: f64,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Mean completion latency, microseconds.
    pub mean_us: f64,
    /// 99th percentile of completion latency, microseconds.
    pub p99_us: f64,
    /// Longest completion latency, microseconds.
    pub max_us: f64,
    /// Processor time of the load generator, in per cent of one core.
    pub client_cpu: f64,
    /// Processor time of the server per request in microseconds, if it was measured.
    pub server_cpu_us: Option<f64>,
}

/// Runs one job.
pub fn run(scratch: &Scratch, endpoint: &Endpoint, job: &Job) -> Result<Sample> {
    run_with(scratch, endpoint, job, &[])
}

/// Runs one job that writes new content with each request, of which this part of each block, in percent, is constant.
pub fn run_compressible(scratch: &Scratch, endpoint: &Endpoint, job: &Job, percent: u32) -> Result<Sample> {
    let part = format!("--buffer_compress_percentage={percent}");
    run_with(scratch, endpoint, job, &["--refill_buffers", "--buffer_compress_chunk=4096", &part])
}

/// Runs one job that writes the same block everywhere.
pub fn run_repeating(scratch: &Scratch, endpoint: &Endpoint, job: &Job) -> Result<Sample> {
    run_with(scratch, endpoint, job, &["--buffer_pattern=0x6c616d696e612e2e"])
}

fn run_with(scratch: &Scratch, endpoint: &Endpoint, job: &Job, options: &[&str]) -> Result<Sample> {
    let output = scratch.path("fio.json");
    let mut command = Command::new("fio");
    command.args(["--name=study", "--ioengine=nbd", "--thread", "--output-format=json", "--randrepeat=0"]);
    command.arg(format!("--uri={}", endpoint.uri()));
    command.arg(format!("--rw={}", job.pattern.word()));
    command.arg(format!("--bs={}", job.block));
    command.arg(format!("--iodepth={}", job.depth));
    command.arg(format!("--size={}", job.size));
    command.arg(format!("--randseed={}", job.seed));
    command.arg(format!("--output={}", output.display()));
    if job.flush_each {
        command.arg("--fsync=1");
    }
    command.args(options);
    let mut limit = GRACE;
    match job.length {
        Length::Time { seconds, ramp } => {
            let (run, ramp) = ((seconds * 1000.0).round(), (ramp * 1000.0).round());
            command.args(["--time_based", "--norandommap"]);
            command.args([format!("--runtime={run}ms"), format!("--ramp_time={ramp}ms")]);
            limit += Duration::from_secs_f64((run + ramp) / 1000.0);
        }
        Length::Bytes(bytes) => {
            command.arg("--end_fsync=1").arg(format!("--io_size={bytes}"));
        }
    }
    process::run_within(&mut command, limit)?;
    let text = std::fs::read_to_string(&output).doing(|| format!("reading {}", output.display()))?;
    parse(&text, job.pattern.writes())
}

/// Parses fio's JSON output, which begins after a line that fio's NBD engine prints.
fn parse(text: &str, writes: bool) -> Result<Sample> {
    let start = text.find("\n{").map_or(0, |at| at + 1);
    let value: Value =
        serde_json::from_str(&text[start..]).map_err(|e| Error::Answer(format!("output of fio: {e}")))?;
    let job = &value["jobs"][0];
    let side = &job[if writes { "write" } else { "read" }];
    let field = |value: &Value, name: &str| {
        value.as_f64().ok_or_else(|| Error::Answer(format!("output of fio has no number for {name}")))
    };
    if field(&job["error"], "error")? != 0.0 {
        return Err(Error::Answer(format!("fio ended with error {}", job["error"])));
    }
    let sample = Sample {
        rate: field(&side["iops"], "iops")?,
        bytes_per_second: field(&side["bw_bytes"], "bw_bytes")?,
        mean_us: field(&side["clat_ns"]["mean"], "mean latency")? / 1000.0,
        p99_us: field(&side["clat_ns"]["percentile"]["99.000000"], "99th percentile")? / 1000.0,
        max_us: field(&side["clat_ns"]["max"], "worst latency")? / 1000.0,
        client_cpu: field(&job["usr_cpu"], "usr_cpu")? + field(&job["sys_cpu"], "sys_cpu")?,
        server_cpu_us: None,
    };
    if sample.rate <= 0.0 {
        return Err(Error::Answer("fio did nothing in the time given: raise --seconds".into()));
    }
    Ok(sample)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const ANSWER: &str = r#"fio: connected to NBD server
{"jobs": [{"error": 0, "usr_cpu": 1.5, "sys_cpu": 2.5,
 "read": {"iops": 10.5, "bw_bytes": 43008,
   "clat_ns": {"mean": 2000.0, "max": 9000, "percentile": {"99.000000": 4000}}},
 "write": {"iops": 0, "bw_bytes": 0, "clat_ns": {"mean": 0, "max": 0}}}]}"#;

    #[test]
    fn the_result_of_fio_is_parsed_after_the_line_of_its_engine() {
        let sample = parse(ANSWER, false).unwrap();
        assert_eq!((sample.rate, sample.p99_us, sample.client_cpu), (10.5, 4.0, 4.0));
    }

    #[test]
    fn a_failed_or_empty_run_is_an_error() {
        assert!(parse(ANSWER, true).is_err());
        assert!(parse(&ANSWER.replace("\"error\": 0", "\"error\": 5"), false).is_err());
        assert!(parse("fio: nbd_connect_uri: refused", false).is_err());
    }
}
