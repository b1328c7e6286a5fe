//! What a run led to.

use serde::Serialize;

use crate::memory::Moves;
use crate::model::Ns;
use crate::traffic::Request;

/// A request that is over.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    /// Until the first token; `None`: refused.
    pub first: Option<Ns>,
    /// Each other token, on average.
    pub other: Ns,
    /// Whether both were in time.
    pub good: bool,
    /// Whether it waited for memory.
    pub queued: bool,
}

/// All that was seen.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// In the order they ended.
    pub requests: Vec<Served>,
    /// What each step waited for mapping.
    pub exposed: Vec<Ns>,
    /// Requests that could not be served at all.
    pub refused: u64,
    /// How often a sequence lost its memory.
    pub preempted: u64,
    /// Prompts whose KV went to the host.
    pub parked: u64,
    /// How often a prefill that was to begin found no memory.
    pub waits: u64,
    /// From the first to the last arrival, and until all was over.
    pub span: Ns,
    /// See there.
    pub end: Ns,
    /// Pages.
    pub moves: Moves,
    /// How often all that must hold was looked at.
    pub checks: u64,
}

/// A row of the table. Times in the units that their names say.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The traffic.
    pub trace: String,
    /// Who decided.
    pub way: String,
    /// Requests that were served well, a second.
    pub goodput: f64,
    /// The same of all requests, from 0 to 1.
    pub attained: f64,
    /// Mapping that a step waited for.
    pub exposed_mean_us: f64,
    /// See there.
    pub exposed_p99_us: f64,
    /// Steps, and those that waited for mapping.
    pub steps: u64,
    /// See there.
    pub stalled: u64,
    /// Requests.
    pub requests: u64,
    /// Of these, refused; that waited for memory.
    pub refused: u64,
    /// See there.
    pub queued: u64,
    /// How often a sequence lost its memory.
    pub preempted: u64,
    /// Prompts whose KV went to the host.
    pub parked: u64,
    /// Time to the first token.
    pub ttft_p50_ms: f64,
    /// See there.
    pub ttft_p99_ms: f64,
    /// Time of each other token.
    pub tpot_p50_ms: f64,
    /// See there.
    pub tpot_p99_ms: f64,
    /// Pages mapped, and those of them that moved twice within 16 steps.
    pub maps: u64,
    /// See there.
    pub twice: u64,
    /// The most bytes mapped.
    pub peak_gib: f64,
    /// How often all that must hold was looked at.
    pub checks: u64,
}

/// The value that so many of 1000 do not exceed.
#[must_use]
pub fn quantile(values: impl Iterator<Item = Ns>, per_mille: usize) -> Ns {
    let mut sorted: Vec<Ns> = values.collect();
    sorted.sort_unstable();
    let place = (sorted.len() * per_mille).div_ceil(1000).saturating_sub(1);
    sorted.get(place).copied().unwrap_or(0)
}

impl Outcome {
    pub(crate) fn over(&mut self, request: &Request, first: Option<Ns>, now: Ns, good: bool, queued: bool) {
        let other = first.map_or(0, |first| (now - first) / (request.output - 1).max(1));
        let first = first.map(|first| first - request.arrival);
        self.requests.push(Served { first, other, good, queued });
    }

    /// Requests that were served well.
    #[must_use]
    pub fn good(&self) -> u64 {
        self.requests.iter().filter(|one| one.good).count() as u64
    }

    /// As a row.
    #[must_use]
    pub fn row(&self, trace: &str, way: &str) -> Row {
        let ms = |ns: Ns| ns as f64 / 1e6;
        let first = || self.requests.iter().filter_map(|one| one.first);
        let other = || self.requests.iter().filter(|one| one.first.is_some()).map(|one| one.other);
        let steps = self.exposed.len().max(1) as f64;
        Row {
            trace: trace.to_owned(),
            way: way.to_owned(),
            goodput: self.good() as f64 / (self.span as f64 / 1e9),
            attained: self.good() as f64 / self.requests.len().max(1) as f64,
            exposed_mean_us: self.exposed.iter().sum::<Ns>() as f64 / steps / 1e3,
            exposed_p99_us: quantile(self.exposed.iter().copied(), 990) as f64 / 1e3,
            steps: self.exposed.len() as u64,
            stalled: self.exposed.iter().filter(|wait| **wait > 0).count() as u64,
            requests: self.requests.len() as u64,
            refused: self.refused,
            queued: self.requests.iter().filter(|one| one.queued).count() as u64,
            preempted: self.preempted,
            parked: self.parked,
            ttft_p50_ms: ms(quantile(first(), 500)),
            ttft_p99_ms: ms(quantile(first(), 990)),
            tpot_p50_ms: ms(quantile(other(), 500)),
            tpot_p99_ms: ms(quantile(other(), 990)),
            maps: self.moves.maps,
            twice: self.moves.twice,
            peak_gib: self.moves.peak_bytes as f64 / (1_u64 << 30) as f64,
            checks: self.checks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::quantile;

    #[test]
    fn a_quantile_is_a_value_that_was_seen() {
        assert_eq!(quantile([5, 1, 3].into_iter(), 500), 3);
        assert_eq!(quantile(1..=1000, 990), 990);
        assert_eq!((quantile([7].into_iter(), 990), quantile(std::iter::empty(), 500)), (7, 0));
    }
}
