//! The jobs of a publisher's callers, and how they are joined into windows.
//!
//! Sends nothing.

use tokio::sync::{mpsc, oneshot};

use super::{Outgoing, PublishResults, WINDOW};

/// The messages of one caller: at most a window.
pub(super) struct Job {
    pub(super) messages: Vec<Outgoing>,
    pub(super) results: oneshot::Sender<PublishResults>,
}

/// The queued jobs, and the one that did not fit into the last window.
pub(super) struct JobQueue {
    pub(super) receiver: mpsc::Receiver<Job>,
    pub(super) next: Option<Job>,
}

impl JobQueue {
    /// Takes the queued jobs, up to a window; waits for the first. `None` when the last handle is dropped.
    pub(super) async fn next_window(&mut self) -> Option<Vec<Job>> {
        let mut jobs: Vec<Job> = Vec::new();
        let mut count = 0;
        loop {
            let job = match self.next.take() {
                Some(job) => job,
                None if jobs.is_empty() => self.receiver.recv().await?,
                None => match self.receiver.try_recv() {
                    Ok(job) => job,
                    Err(_) => return Some(jobs),
                },
            };
            // Its caller's timeout has ended, and a stalled broker must not get messages whose result is not needed.
            if job.results.is_closed() {
                continue;
            }
            count += job.messages.len();
            if count > WINDOW && !jobs.is_empty() {
                self.next = Some(job);
                return Some(jobs);
            }
            jobs.push(job);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publisher::QUEUED_JOBS;
    use crate::publisher::outgoing::tests::message;

    #[tokio::test]
    async fn windows_never_exceed_limit() {
        let (jobs, receiver) = mpsc::channel(QUEUED_JOBS);
        let mut waiting = Vec::new();
        for count in [999, 1, 1, 999, 600, 600, 400, WINDOW, 3] {
            let (results, receiver) = oneshot::channel();
            jobs.try_send(Job { messages: vec![message(); count], results }).ok().unwrap();
            waiting.push(receiver);
        }
        // The caller has gone.
        drop(waiting.remove(8));
        drop(jobs);
        let mut queue = JobQueue { receiver, next: None };
        let mut windows = Vec::new();
        while let Some(jobs) = queue.next_window().await {
            windows.push(jobs.iter().map(|job| job.messages.len()).collect::<Vec<_>>());
        }
        assert_eq!(windows, [vec![999, 1], vec![1, 999], vec![600], vec![600, 400], vec![WINDOW]]);
    }
}
