//! Requests generated from a seed, with the marginal distributions of public traces.

use crate::model::Ns;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Time of arrival.
    pub arrival: Ns,
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Tokens to generate, known only to the oracle.
    pub output: u64,
}

/// Random numbers by seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Equal seeds give equal numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a random 64-bit number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end.max(1)
    }
}

/// A distribution by its quantiles 0.1, 0.5, 0.9, 0.99 and 1; log-linear between.
#[derive(Clone, Copy, Debug)]
pub struct Quantiles(pub [u64; 5]);

impl Quantiles {
    fn draw(&self, random: &mut Random) -> u64 {
        let at = random.unit();
        let (mut from, mut low) = (0.0, (self.0[0] as f64 / 3.0).max(1.0));
        for (to, high) in [0.1, 0.5, 0.9, 0.99, 1.0].into_iter().zip(self.0) {
            let high = (high as f64).max(low);
            if at < to {
                return (low * (high / low).powf((at - from) / (to - from))).round().max(1.0) as u64;
            }
            (from, low) = (to, high);
        }
        low as u64
    }
}

/// Arrival process.
#[derive(Clone, Copy, Debug)]
pub enum Arrivals {
    /// Poisson arrivals.
    Poisson,
    /// Poisson arrivals of groups with this mean size.
    Bursts(f64),
    /// Alternates this many seconds of Poisson arrivals and of silence.
    Idle(f64),
}

/// A traffic generator.
#[derive(Clone, Copy, Debug)]
pub struct Generator {
    /// Name.
    pub name: &'static str,
    /// Average requests per second.
    pub rate: f64,
    /// Arrival process.
    pub arrivals: Arrivals,
    /// Prompt tokens.
    pub prompt: Quantiles,
    /// Output tokens.
    pub output: Quantiles,
    /// Extra bursts: every this many seconds, a number of prompts with this length distribution.
    pub long: Option<(f64, u64, Quantiles)>,
}

/// Azure's conversations of 2023: quantiles read from `AzureLLMInferenceTrace_conv.csv`.
const CONVERSATION: (Quantiles, Quantiles) =
    (Quantiles([207, 1020, 2735, 4142, 14050]), Quantiles([54, 129, 424, 601, 1000]));
/// Azure's code completions of 2023, `AzureLLMInferenceTrace_code.csv`.
const CODE: (Quantiles, Quantiles) =
    (Quantiles([147, 1469, 5194, 7436, 7437]), Quantiles([7, 13, 55, 252, 1899]));
/// Mooncake's conversations, `conversation_trace.jsonl`, cut at the maximum prompt length.
const MOONCAKE: (Quantiles, Quantiles) =
    (Quantiles([964, 6909, 27367, 32768, 32768]), Quantiles([24, 350, 597, 1120, 2000]));

/// The generated traffics, with rates at which memory limits the throughput.
pub const GENERATORS: [Generator; 6] = [
    Generator {
        name: "conversation",
        rate: 11.5,
        arrivals: Arrivals::Poisson,
        prompt: CONVERSATION.0,
        output: CONVERSATION.1,
        long: None,
    },
    Generator {
        name: "code",
        rate: 6.0,
        arrivals: Arrivals::Bursts(4.0),
        prompt: CODE.0,
        output: CODE.1,
        long: None,
    },
    Generator {
        name: "long context",
        rate: 1.2,
        arrivals: Arrivals::Poisson,
        prompt: MOONCAKE.0,
        output: MOONCAKE.1,
        long: None,
    },
    Generator {
        name: "staggered",
        rate: 40.0,
        arrivals: Arrivals::Poisson,
        prompt: Quantiles([48, 128, 256, 320, 384]),
        output: Quantiles([40, 128, 216, 252, 256]),
        long: Some((9.0, 1, Quantiles([24000, 28000, 32000, 32768, 32768]))),
    },
    Generator {
        name: "idle phases",
        rate: 13.0,
        arrivals: Arrivals::Idle(15.0),
        prompt: CONVERSATION.0,
        output: CONVERSATION.1,
        long: None,
    },
    Generator {
        name: "long bursts",
        rate: 7.0,
        arrivals: Arrivals::Poisson,
        prompt: CONVERSATION.0,
        output: CONVERSATION.1,
        long: Some((20.0, 4, Quantiles([12000, 20000, 28000, 32768, 32768]))),
    },
];

impl Generator {
    /// Generates this many seconds of requests.
    #[must_use]
    pub fn requests(&self, seconds: f64, seed: u64) -> Vec<Request> {
        let random = &mut Random::new(seed);
        let mut found = Vec::new();
        let (mut at, mut active) = (0.0, 0.0);
        let group = if let Arrivals::Bursts(size) = self.arrivals { size } else { 1.0 };
        loop {
            let gap = -(1.0 - random.unit()).ln() * group / self.rate;
            active += gap;
            at = match self.arrivals {
                Arrivals::Idle(length) => active + (active / length).floor() * length,
                Arrivals::Poisson | Arrivals::Bursts(_) => at + gap,
            };
            if at >= seconds {
                break;
            }
            loop {
                found.push(self.request(at, self.prompt, random));
                if random.unit() * group < 1.0 {
                    break;
                }
            }
        }
        if let Some((every, count, prompt)) = self.long {
            let times = (seconds / every) as u64;
            for burst in 1..=times {
                found.extend((0..count).map(|_| self.request((burst as f64 - 0.5) * every, prompt, random)));
            }
        }
        found.sort_by_key(|request| request.arrival);
        found
    }

    fn request(&self, at: f64, prompt: Quantiles, random: &mut Random) -> Request {
        let (prompt, output) = (prompt.draw(random), self.output.draw(random));
        Request { arrival: (at * 1e9) as Ns, prompt, output }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generator_keeps_its_rate_its_quantiles_and_its_seed() {
        for generator in GENERATORS {
            let seconds = 4000.0;
            let requests = generator.requests(seconds, 7);
            assert_eq!(requests, generator.requests(seconds, 7));
            assert_ne!(requests, generator.requests(seconds, 8));
            assert!(requests.windows(2).all(|pair| pair[0].arrival <= pair[1].arrival));
            let extra = generator.long.map_or(0.0, |(every, count, _)| count as f64 / every);
            let active = if matches!(generator.arrivals, Arrivals::Idle(_)) { 0.5 } else { 1.0 };
            let rate = requests.len() as f64 / seconds;
            let expected = generator.rate * active + extra;
            assert!((rate / expected - 1.0).abs() < 0.05, "{}: {rate} for {expected}", generator.name);
            let mut outputs: Vec<u64> = requests.iter().map(|request| request.output).collect();
            outputs.sort_unstable();
            for (part, quantile) in
                [(0.1, generator.output.0[0]), (0.5, generator.output.0[1]), (0.9, generator.output.0[2])]
            {
                let found = outputs[(part * outputs.len() as f64) as usize] as f64 / quantile as f64;
                assert!((0.85..1.15).contains(&found), "{}: {found} at {part}", generator.name);
            }
        }
    }

    #[test]
    fn idle_phases_are_silent() {
        let idle =
            GENERATORS.iter().find(|generator| matches!(generator.arrivals, Arrivals::Idle(_))).unwrap();
        let Arrivals::Idle(length) = idle.arrivals else { return };
        for request in idle.requests(300.0, 1) {
            let phase = (request.arrival as f64 / 1e9 / length) as u64;
            assert!(phase.is_multiple_of(2), "{request:?}");
        }
    }
}
