//! Scheduling attributes of threads.

/// A thread of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    #[cfg(target_os = "linux")]
    id: rustix::thread::Pid,
}

impl Thread {
    /// The calling thread.
    pub fn current() -> Self {
        Self {
            #[cfg(target_os = "linux")]
            id: rustix::thread::gettid(),
        }
    }

    /// With `short`, the scheduler runs the thread soon after it wakes, in short slices: for a thread that answers a
    /// user or a guest while other threads use all processors. On a busy machine this saves a few milliseconds per
    /// answer. It requires no privilege, because other threads keep their share of processor time (Linux 6.12 and
    /// later, `sched_setattr(2)`: a slice shorter than the default one); elsewhere it does nothing. Without `short`,
    /// the thread has the default slice again.
    pub fn set_short_slice(self, short: bool) {
        #[cfg(target_os = "linux")]
        ask(self.id, if short { SLICE } else { 0 });
        #[cfg(not(target_os = "linux"))]
        let _ = short;
    }
}

/// The requested slice, in nanoseconds: the shortest that the kernel grants.
#[cfg(target_os = "linux")]
const SLICE: u64 = 100_000;

/// `struct sched_attr`, first version.
#[cfg(target_os = "linux")]
#[repr(C)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

#[cfg(target_os = "linux")]
fn ask(thread: rustix::thread::Pid, slice: u64) {
    let attributes = Attributes {
        size: size_of::<Attributes>() as u32,
        policy: 0,
        flags: 0,
        // The call sets the nice value too, so the present value is passed.
        nice: rustix::process::getpriority_process(Some(thread)).unwrap_or(0),
        priority: 0,
        // 0: the default.
        runtime: slice,
        deadline: 0,
        period: 0,
    };
    // SAFETY: the kernel reads `size` bytes of a structure that lives through the call. A kernel that does not know the
    // call, or a thread that has ended, is answered with an error, which changes nothing.
    unsafe {
        libc::syscall(libc::SYS_sched_setattr, thread.as_raw_nonzero().get(), std::ptr::from_ref(&attributes), 0)
    };
}
