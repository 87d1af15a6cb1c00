//! Samples of the growth of a served datastore.
//!
//! A thread takes a sample every minute. A sample reads counters and the sizes of image files; it makes no request to
//! disks. The samples are written every ten minutes and at the end.

use backend::clock;
use disk::Datastore;
use error::{IoContext, Result};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two samples.
const INTERVAL: Duration = Duration::from_secs(60);
/// Number of samples between two writes of the record.
const SAMPLES_BY_WRITE: u32 = 10;

/// The thread that takes samples. Dropping this value ends the thread and writes the samples.
pub struct Sampling {
    datastore: Arc<Datastore>,
    shared: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Sampling {
    /// Takes the first sample and starts the thread.
    pub fn start(datastore: &Arc<Datastore>) -> Result<Self> {
        let (datastore, shared) = (Arc::clone(datastore), Arc::<(Mutex<bool>, Condvar)>::default());
        datastore.sample_growth(clock::seconds());
        let (sampled, signal) = (Arc::clone(&datastore), Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("sampling".to_owned());
        let thread = thread.spawn(move || sample(&sampled, &signal));
        let thread = thread.during(|| "starting the thread that samples the growth of the datastore".into())?;
        Ok(Self { datastore, shared, thread: Some(thread) })
    }
}

fn sample(datastore: &Datastore, (ended, signal): &(Mutex<bool>, Condvar)) {
    let mut samples = 0;
    let mut ended = ended.lock();
    while !*ended {
        if !signal.wait_for(&mut ended, INTERVAL).timed_out() {
            continue;
        }
        parking_lot::MutexGuard::unlocked(&mut ended, || datastore.sample_growth(clock::seconds()));
        samples += 1;
        if samples % SAMPLES_BY_WRITE == 0 {
            parking_lot::MutexGuard::unlocked(&mut ended, || write(datastore));
        }
    }
}

fn write(datastore: &Datastore) {
    if let Err(error) = datastore.write_growth() {
        tracing::warn!(%error, "the growth of the datastore is not recorded; the next attempt is in ten minutes");
    }
}

impl Drop for Sampling {
    fn drop(&mut self) {
        *self.shared.0.lock() = true;
        self.shared.1.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that samples the growth of the datastore has panicked");
        }
        self.datastore.sample_growth(clock::seconds());
        write(&self.datastore);
    }
}
