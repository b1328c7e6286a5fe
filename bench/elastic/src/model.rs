//! Durations of engine steps, and costs of driver calls. Every number has its source.

/// Nanoseconds of the virtual clock.
pub type Ns = u64;

/// 2^30 bytes.
pub const GIB: u64 = 1 << 30;

/// A model on a device.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// Tokens per block of the cache, the default of engines.
    pub block_tokens: u64,
    /// Number of layers (Qwen3-8B).
    pub layers: u64,
    /// Bytes of one token's keys or values in one layer: 8 KV heads of 128, 2 bytes (Qwen3-8B).
    pub plane_token_bytes: u64,
    /// Bytes per prefill token: 1056 MiB live at 8192 tokens in `tests/data/capture-trace-65.txt`,
    /// in proportion at 4096 and 6144.
    pub activation_token_bytes: u64,
    /// Parameters, two bytes each (Qwen3-8B).
    pub parameters: f64,
    /// Query heads times their width.
    pub attention_width: f64,
    /// Operations a second: half of the H200 data sheet's 989 Tflop/s (dense, 16 bits); the half is
    /// assumed.
    pub flops: f64,
    /// Bytes a second: seven tenths of the data sheet's 4.8 TB/s; the share is assumed.
    pub bandwidth: f64,
    /// Bytes a second of the host link: measured, 51.5 GiB/s.
    pub link: f64,
    /// Host time of the engine per step: assumed.
    pub host_ns: Ns,
    /// Maximum prompt tokens per step, unless a single prompt is longer.
    pub step_tokens: u64,
    /// Maximum prompt length.
    pub longest_prompt: u64,
    /// Maximum number of decoding sequences.
    pub batch: usize,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            block_tokens: 16,
            layers: 36,
            plane_token_bytes: 8 * 128 * 2,
            activation_token_bytes: 132 << 10,
            parameters: 8.2e9,
            attention_width: 32.0 * 128.0,
            flops: 0.5 * 989e12,
            bandwidth: 0.7 * 4.8e12,
            link: 51.5 * GIB as f64,
            host_ns: 500_000,
            step_tokens: 8192,
            longest_prompt: 32768,
            batch: 256,
        }
    }
}

impl Model {
    /// Bytes of a block in all planes.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        2 * self.layers * self.block_tokens * self.plane_token_bytes
    }

    /// Number of blocks for this many tokens.
    #[must_use]
    pub fn blocks(&self, tokens: u64) -> u64 {
        tokens.div_ceil(self.block_tokens)
    }

    /// Bytes of a running prefill. KV for the host has two layers on the device.
    #[must_use]
    pub fn activations(&self, tokens: u64, to_host: u64) -> u64 {
        tokens * self.activation_token_bytes + 4 * to_host * self.plane_token_bytes
    }

    /// Duration of a prefill step.
    #[must_use]
    pub fn prefill(&self, prompts: impl Iterator<Item = u64>) -> Ns {
        let operations: f64 = prompts
            .map(|tokens| tokens as f64)
            // Causal attention: half of two products of 2 n^2 w each.
            .map(|n| 2.0 * self.parameters * n + 2.0 * n * n * self.attention_width * self.layers as f64)
            .sum();
        self.host_ns + seconds((operations / self.flops).max(2.0 * self.parameters / self.bandwidth))
    }

    /// Duration of a decode step with `tokens` cached tokens.
    #[must_use]
    pub fn decode(&self, batch: u64, tokens: u64) -> Ns {
        let cache = tokens as f64 * (2 * self.layers * self.plane_token_bytes) as f64;
        let bytes = (2.0 * self.parameters + cache) / self.bandwidth;
        self.host_ns + seconds(bytes.max(2.0 * self.parameters * batch as f64 / self.flops))
    }

    /// Duration of a copy over the host link.
    #[must_use]
    pub fn copy(&self, bytes: u64) -> Ns {
        seconds(bytes as f64 / self.link)
    }
}

fn seconds(seconds: f64) -> Ns {
    (seconds * 1e9) as Ns
}

/// Costs of calls for a page size, measured on an H200 (the table in docs/elastic.md); interpolated
/// linearly over the logarithm of the size.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    map: Ns,
    create: Ns,
    unmap: Ns,
    release: Ns,
}

/// Counts of driver calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Pages mapped, with access.
    pub maps: u64,
    /// Pages created.
    pub creates: u64,
    /// Pages unmapped.
    pub unmaps: u64,
    /// Pages released.
    pub releases: u64,
}

impl Costs {
    /// Costs for pages of this many bytes.
    #[must_use]
    pub fn of_pages(bytes: u64) -> Self {
        let mib = (bytes as f64 / (1 << 20) as f64).max(2.0);
        let line = |points: &[(f64, f64)]| {
            let mut below = points[0];
            for at in points {
                if mib <= at.0 {
                    let part =
                        if at.0 > below.0 { (mib / below.0).ln() / (at.0 / below.0).ln() } else { 0.0 };
                    return ((below.1 + part * (at.1 - below.1)) * 1e3) as Ns;
                }
                below = *at;
            }
            (below.1 * 1e3) as Ns
        };
        Self {
            map: line(&[(2.0, 24.0), (16.0, 22.0), (64.0, 22.0), (1024.0, 51.0)]),
            create: line(&[(2.0, 9.0), (4096.0, 53.0)]),
            unmap: line(&[(2.0, 15.0)]),
            release: line(&[(2.0, 9.0), (64.0, 30.0)]),
        }
    }

    /// Total cost of sequential calls.
    #[must_use]
    pub fn of(&self, calls: Calls) -> Ns {
        calls.maps * self.map
            + calls.creates * self.create
            + calls.unmaps * self.unmap
            + calls.releases * self.release
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_those_that_were_measured() {
        let (small, large) = (Costs::of_pages(2 << 20), Costs::of_pages(64 << 20));
        assert_eq!((small.map, small.create, small.unmap, small.release), (24_000, 9_000, 15_000, 9_000));
        assert_eq!((large.map, large.unmap, large.release), (22_000, 15_000, 30_000));
        let calls = Calls { maps: 2, creates: 1, unmaps: 1, releases: 0 };
        assert_eq!(small.of(calls), 72_000);
    }

    #[test]
    fn steps_take_what_the_data_sheet_allows() {
        let model = Model::default();
        assert_eq!(model.block_bytes(), 2_359_296);
        // 8192 tokens: 134 Tflop in products, 20 in attention.
        let long = model.prefill([8192].into_iter());
        assert!((300_000_000..330_000_000).contains(&long), "{long}");
        let step = model.decode(64, 64 * 1024);
        assert!((7_000_000..9_000_000).contains(&step), "{step}");
    }
}
