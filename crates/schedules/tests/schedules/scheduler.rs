//! The choice of the next thread, in one of three ways. Each way finds faults that the others seldom find.

use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use testkit::Random;

/// How the next thread is chosen.
enum Manner {
    /// Any runnable thread.
    Uniform,
    /// Usually the thread of the previous step, and in one of n steps, on average, any runnable thread; n is this
    /// number. So a thread runs many steps before another runs.
    Sticky(u64),
    /// The thread with the highest priority. In one of n steps, on average, the current thread gets the lowest
    /// priority; n is this number (probabilistic concurrency testing: few switches, each at a random step).
    Priorities(u64),
}

/// The scheduler of one schedule, derived from a seed.
pub struct Chooser {
    random: Random,
    manner: Manner,
    /// The priority of each task, by task number; the task with the highest priority is chosen.
    priorities: Vec<i64>,
    lowest: i64,
    begun: bool,
    steps: Arc<AtomicU64>,
}

impl Chooser {
    /// A scheduler that counts its steps in `steps`.
    pub fn new(seed: u64, steps: Arc<AtomicU64>) -> Self {
        let mut random = Random(seed);
        let manner = match random.below(4) {
            0 => Manner::Uniform,
            1 => Manner::Sticky(1 << (1 + random.below(6))),
            _ => Manner::Priorities(1 << (4 + random.below(9))),
        };
        Self { random, manner, priorities: Vec::new(), lowest: 0, begun: false, steps }
    }

    fn priority(&mut self, task: usize) -> i64 {
        while self.priorities.len() <= task {
            self.priorities.push((self.random.next() >> 2) as i64);
        }
        self.priorities[task]
    }
}

impl Scheduler for Chooser {
    fn new_execution(&mut self) -> Option<Schedule> {
        (!std::mem::replace(&mut self.begun, true)).then(|| Schedule::new(0))
    }

    fn next_task(&mut self, runnable: &[&Task], current: Option<TaskId>, yields: bool) -> Option<TaskId> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        let can_go_on = current.filter(|current| runnable.iter().any(|task| task.id() == *current));
        match self.manner {
            Manner::Priorities(length) => {
                if let Some(current) = current
                    && (yields || self.random.below(length) == 0)
                {
                    self.priority(current.into());
                    self.lowest -= 1;
                    self.priorities[usize::from(current)] = self.lowest;
                }
                runnable.iter().map(|task| task.id()).max_by_key(|task| self.priority((*task).into()))
            }
            Manner::Sticky(length) if !yields && can_go_on.is_some() && self.random.below(length) > 0 => can_go_on,
            _ => {
                let others = runnable.iter().map(|task| task.id()).filter(|task| !yields || Some(*task) != current);
                let others: Vec<TaskId> = others.collect();
                if others.is_empty() { can_go_on } else { Some(*self.random.pick(&others)) }
            }
        }
    }

    fn next_u64(&mut self) -> u64 {
        self.random.next()
    }
}
