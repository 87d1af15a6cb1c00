//! Atomic numbers. Before every operation with an ordering, the scheduler may run another thread. Relaxed operations,
//! used for counters in reports, do not call the scheduler: further schedules would only cost time.

pub use std::sync::atomic::Ordering;

/// Lets the scheduler choose the next thread.
fn step(order: Ordering) {
    if order != Ordering::Relaxed {
        // A sleep of shuttle does nothing but let the scheduler choose.
        shuttle::thread::sleep(std::time::Duration::ZERO);
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        /// An atomic number.
        #[derive(Debug, Default)]
        pub struct $name(std::sync::atomic::$name);

        impl $name {
            /// A number with an initial value.
            pub const fn new(value: $value) -> Self {
                Self(std::sync::atomic::$name::new(value))
            }

            /// The current value.
            pub fn load(&self, order: Ordering) -> $value {
                step(order);
                self.0.load(Ordering::SeqCst)
            }

            /// Sets the value.
            pub fn store(&self, value: $value, order: Ordering) {
                step(order);
                self.0.store(value, Ordering::SeqCst);
            }
        }
    };
}

atomic!(AtomicBool, bool);
atomic!(AtomicU16, u16);
atomic!(AtomicU64, u64);

macro_rules! swap {
    ($name:ident, $value:ty) => {
        impl $name {
            /// Sets the value, and returns the previous value.
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                step(order);
                self.0.swap(value, Ordering::SeqCst)
            }
        }
    };
}

swap!(AtomicBool, bool);
swap!(AtomicU64, u64);

impl AtomicU64 {
    /// Adds `value`, and returns the previous number.
    pub fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        step(order);
        self.0.fetch_add(value, Ordering::SeqCst)
    }

    /// Subtracts `value`, and returns the previous number.
    pub fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        step(order);
        self.0.fetch_sub(value, Ordering::SeqCst)
    }

    /// Raises the number to at least `value`, and returns the previous number.
    pub fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
        step(order);
        self.0.fetch_max(value, Ordering::SeqCst)
    }

    /// Sets the bits `bits`, and returns the previous value.
    pub fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
        step(order);
        self.0.fetch_or(bits, Ordering::SeqCst)
    }
}
