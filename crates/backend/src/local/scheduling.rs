//! Scheduling attributes of threads.

/// Makes the scheduler run the calling thread soon after it wakes, in short slices: for threads that answer a user or a
/// guest beside threads that always compute, or that outnumber the processors. On a busy machine this saves a few
/// milliseconds per answer. It takes no privilege, because other threads keep their share of processor time (Linux 6.12
/// and later, `sched_setattr(2)`: a slice shorter than the default one); elsewhere it does nothing.
pub fn wake_promptly() {
    #[cfg(target_os = "linux")]
    ask();
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
fn ask() {
    let attributes = Attributes {
        size: size_of::<Attributes>() as u32,
        policy: 0,
        flags: 0,
        // The call sets the nice value too: this keeps the present one.
        nice: rustix::process::getpriority_process(None).unwrap_or(0),
        priority: 0,
        runtime: SLICE,
        deadline: 0,
        period: 0,
    };
    // SAFETY: the kernel reads `size` bytes of a structure that lives through the call; thread 0 is the calling one. A
    // kernel without this call, or without the slice in it, returns an error and changes nothing.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, std::ptr::from_ref(&attributes), 0) };
}
