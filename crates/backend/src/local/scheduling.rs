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

    /// Requests a slice of processor time from the scheduler. It takes no privilege, because each thread keeps its
    /// share of processor time (Linux 6.12 and later, `sched_setattr(2)`); on other systems and versions the call does
    /// nothing.
    pub fn set_slice(self, slice: Slice) {
        #[cfg(target_os = "linux")]
        ask(self.id, slice.nanoseconds());
        #[cfg(not(target_os = "linux"))]
        let _ = slice;
    }
}

/// How long a thread runs at a time beside others. A thread that wakes interrupts a thread with a longer slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slice {
    /// Short: the thread runs soon after it wakes. Meant for a thread that answers a user or a guest beside threads
    /// that always compute, or that outnumber the processors. On a busy machine this saves a few milliseconds per
    /// answer.
    Short,
    /// The kernel's default, which threads have that request no slice.
    Default,
    /// Long: every thread with another slice interrupts it. Meant for a thread that computes and that nothing waits
    /// for.
    Long,
}

impl Slice {
    /// The length to request: the shortest and the longest that the kernel grants, 0 for the default.
    #[cfg(target_os = "linux")]
    fn nanoseconds(self) -> u64 {
        match self {
            Self::Short => 100_000,
            Self::Default => 0,
            Self::Long => 100_000_000,
        }
    }
}

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
    // SAFETY: the kernel reads `size` bytes of a structure that lives through the call. If the kernel does not have
    // the call, or the thread has ended, the call returns an error and changes nothing.
    unsafe {
        libc::syscall(libc::SYS_sched_setattr, thread.as_raw_nonzero().get(), std::ptr::from_ref(&attributes), 0)
    };
}
