//! Results of a run.

use serde::Serialize;

use crate::memory::Moves;
use crate::model::Ns;
use crate::traffic::Request;

/// A finished request.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    /// Time to the first token; `None` if refused.
    pub first: Option<Ns>,
    /// Average time per further token.
    pub other: Ns,
    /// True if both times met the objective.
    pub good: bool,
    /// True if the request waited for memory.
    pub queued: bool,
}

/// All measurements of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Finished requests, in order of completion.
    pub requests: Vec<Served>,
    /// Time each step waited for mapping.
    pub exposed: Vec<Ns>,
    /// Requests refused on arrival or after preemption.
    pub refused: u64,
    /// Number of preemptions.
    pub preempted: u64,
    /// Prompts moved to the host.
    pub parked: u64,
    /// Number of prefills refused for lack of memory.
    pub waits: u64,
    /// First to last arrival.
    pub span: Ns,
    /// Last completion.
    pub end: Ns,
    /// Page counters.
    pub moves: Moves,
    /// Number of invariant checks.
    pub checks: u64,
}

/// A row of the table, with units in the field names.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name of the traffic.
    pub trace: String,
    /// Name of the policy.
    pub way: String,
    /// Requests a second within the objective.
    pub goodput: f64,
    /// Fraction within the objective.
    pub attained: f64,
    /// Mean time a step waits for mapping.
    pub exposed_mean_us: f64,
    /// 99th percentile of the same.
    pub exposed_p99_us: f64,
    /// Number of steps.
    pub steps: u64,
    /// Number of steps that waited for mapping.
    pub stalled: u64,
    /// Number of requests.
    pub requests: u64,
    /// Number of refused requests.
    pub refused: u64,
    /// Number of requests that waited for memory.
    pub queued: u64,
    /// Number of preemptions.
    pub preempted: u64,
    /// Prompts moved to the host.
    pub parked: u64,
    /// Median time to the first token.
    pub ttft_p50_ms: f64,
    /// 99th percentile of the same.
    pub ttft_p99_ms: f64,
    /// Median time per further token.
    pub tpot_p50_ms: f64,
    /// 99th percentile of the same.
    pub tpot_p99_ms: f64,
    /// Pages mapped.
    pub maps: u64,
    /// Pages moved twice within 16 steps.
    pub twice: u64,
    /// Peak mapped memory.
    pub peak_gib: f64,
    /// Number of invariant checks.
    pub checks: u64,
}

/// Returns the `per_mille` quantile.
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

    /// Number of requests within the objective.
    #[must_use]
    pub fn good(&self) -> u64 {
        self.requests.iter().filter(|one| one.good).count() as u64
    }

    /// Converts to a row.
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
