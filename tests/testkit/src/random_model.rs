//! Allocation traces of random models: six families, reproducible from the seed.

use crate::model::Recorder;
use crate::{Random, Shape, Trace};

#[derive(Clone, Copy, Debug)]
enum Layer {
    /// Attention and a feed-forward part.
    Dense,
    /// Attention and `count` experts, `chosen` for each token; `shared`: one more expert serves
    /// every token.
    Experts { count: u64, chosen: u64, shared: bool },
    /// Attention over a latent vector of `rank` elements, and a feed-forward part.
    Latent { rank: u64 },
    /// A state-space layer with `state` elements for each channel, scanned in chunks of `chunk`
    /// tokens.
    Scan { state: u64, chunk: u64 },
    /// Attention between patches, and a feed-forward part with one matrix.
    Vision,
}

/// The sizes of a random model, in elements of two bytes.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    layer: Layer,
    hidden: u64,
    intermediate: u64,
    heads: u64,
    key_heads: u64,
    head: u64,
    layers: u64,
    vocabulary: u64,
    /// Tokens of each sequence in a decode step; above 1 when a draft is verified.
    drafted: u64,
}

/// Returns the captures of a random model, small shapes first. Families: dense, experts, latent
/// attention, state space, vision, speculative; decode batches up to 1,024, prefills up to 16,384
/// tokens.
#[must_use]
pub fn random_model(seed: u64) -> Trace {
    let r = &mut Random::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    // Near seeds give near first numbers: discard them.
    let _ = (r.below(2), r.below(2), r.below(2));
    let family = r.below(6);
    let hidden = 128 * (2 + r.below(15).pow(2) / 4);
    let head = r.choose(&[64, 80, 96, 128]);
    let heads = (hidden / head).max(1);
    let sizes = Sizes {
        layer: match family {
            1 => Layer::Experts {
                count: r.choose(&[8, 32, 64, 128, 256]),
                chosen: r.choose(&[1, 2, 4, 6, 8]),
                shared: r.below(2) == 0,
            },
            2 => Layer::Latent { rank: r.choose(&[256, 512]) },
            3 => Layer::Scan { state: r.choose(&[16, 64, 128]), chunk: r.choose(&[64, 128, 256]) },
            4 => Layer::Vision,
            _ => Layer::Dense,
        },
        hidden,
        intermediate: 64 * (hidden * (10 + r.below(30)) / 10 / 64),
        heads,
        key_heads: (heads / r.choose(&[1, 2, 4, 8])).max(1),
        head,
        layers: 2 + r.below(7),
        vocabulary: 32 * (100 + r.below(70).pow(2)),
        drafted: if family == 5 { 2 + r.below(7) } else { 1 },
    };
    let name = ["dense", "experts", "latent", "scan", "vision", "speculative"][family as usize];
    let mut shapes: Vec<Shape> = if family == 4 {
        let patches = r.choose(&[196, 256, 576, 729, 1024]);
        steps(r, 32, 6).into_iter().map(|images| sizes.shape('p', images * patches)).collect()
    } else {
        let most = 1 << r.below(11);
        let decode = steps(r, most, 9).into_iter().map(|batch| sizes.shape('d', batch));
        decode.collect()
    };
    if family != 4 && r.below(4) > 0 {
        let most = 64 << r.below(9);
        let prefill: Vec<u64> = steps(r, most, 6).into_iter().filter(|tokens| *tokens >= 16).collect();
        shapes.extend(prefill.into_iter().map(|tokens| sizes.shape('p', tokens)));
    }
    Trace { name: format!("{name} {seed}"), shapes }
}

fn steps(r: &mut Random, most: u64, count: u64) -> Vec<u64> {
    let mut found: Vec<u64> = match r.below(3) {
        0 => (0..count).map(|n| most >> n).collect(),
        1 => (1..=count).map(|n| most * n / count).collect(),
        _ => (1..count).map(|_| 1 + r.below(most)).chain([most]).collect(),
    };
    found.retain(|number| *number > 0);
    found.sort_unstable();
    found.dedup();
    found
}

impl Sizes {
    fn shape(&self, kind: char, count: u64) -> Shape {
        let r = &mut Recorder::default();
        let tokens = if kind == 'd' { count * self.drafted } else { count };
        let stream = 2 * tokens * self.hidden;
        let mut residual = r.allocate(stream);
        let mut normed = r.allocate(stream);
        for _ in 0..self.layers {
            let mixed = match self.layer {
                Layer::Scan { state, chunk } => self.scan(r, tokens, state, chunk),
                Layer::Latent { rank } => self.latent(r, tokens, rank, kind),
                _ => self.attention(r, tokens),
            };
            let sum = r.allocate(stream);
            r.free(mixed);
            r.free(residual);
            r.free(normed);
            residual = sum;
            let second = r.allocate(stream);
            r.briefly(4 * tokens);
            let out = match self.layer {
                Layer::Experts { count, chosen, shared } => self.experts(r, tokens, (count, chosen), shared),
                Layer::Vision => {
                    let wide = r.allocate(2 * tokens * self.intermediate);
                    let active = r.allocate(2 * tokens * self.intermediate);
                    r.free(wide);
                    let out = r.allocate(stream);
                    r.free(active);
                    out
                }
                _ => self.feed_forward(r, tokens),
            };
            r.free(second);
            let sum = r.allocate(stream);
            r.free(out);
            r.free(residual);
            residual = sum;
            normed = r.allocate(stream);
            r.briefly(4 * tokens);
        }
        r.free(residual);
        if !matches!(self.layer, Layer::Vision) {
            let rows = if kind == 'd' { tokens } else { 1 };
            let logits = r.allocate(2 * rows * self.vocabulary);
            let wide = r.allocate(4 * rows * self.vocabulary);
            r.free(logits);
            if self.drafted > 1 && kind == 'd' {
                let chances = r.allocate(4 * rows * self.vocabulary);
                r.briefly(8 * rows);
                r.free(chances);
            }
            r.free(wide);
        }
        r.free(normed);
        r.shape(kind, count as u32)
    }

    fn attention(&self, r: &mut Recorder, tokens: u64) -> usize {
        let qkv = r.allocate(2 * tokens * (self.heads + 2 * self.key_heads) * self.head);
        let turned = r.allocate(2 * tokens * self.heads * self.head);
        let attended = r.allocate(2 * tokens * self.heads * self.head);
        r.briefly(4 * tokens * self.heads);
        r.free(turned);
        r.free(qkv);
        let out = r.allocate(2 * tokens * self.hidden);
        r.free(attended);
        out
    }

    fn latent(&self, r: &mut Recorder, tokens: u64, rank: u64, kind: char) -> usize {
        let low = r.allocate(2 * tokens * 3 * rank);
        let query = r.allocate(2 * tokens * self.heads * 192);
        let latent = r.allocate(2 * tokens * (rank + 64));
        r.free(low);
        let wide = if kind == 'p' {
            r.allocate(2 * tokens * self.heads * 256)
        } else {
            r.allocate(2 * tokens * self.heads * (rank + 64))
        };
        let attended = r.allocate(2 * tokens * self.heads * 128);
        [query, latent, wide].iter().for_each(|id| r.free(*id));
        let out = r.allocate(2 * tokens * self.hidden);
        r.free(attended);
        out
    }

    fn scan(&self, r: &mut Recorder, tokens: u64, state: u64, chunk: u64) -> usize {
        let inner = 2 * self.hidden;
        let projected = r.allocate(2 * tokens * (2 * inner + 2 * state + inner / 64));
        let convolved = r.allocate(2 * tokens * (inner + 2 * state));
        let steps = r.allocate(4 * tokens * (inner / 64).max(1));
        let states = r.allocate(4 * tokens.div_ceil(chunk) * inner * state);
        let scanned = r.allocate(2 * tokens * inner);
        [convolved, steps, states].iter().for_each(|id| r.free(*id));
        let gated = r.allocate(2 * tokens * inner);
        r.free(scanned);
        r.free(projected);
        let out = r.allocate(2 * tokens * self.hidden);
        r.free(gated);
        out
    }

    fn feed_forward(&self, r: &mut Recorder, tokens: u64) -> usize {
        let wide = r.allocate(4 * tokens * self.intermediate);
        let product = r.allocate(2 * tokens * self.intermediate);
        r.free(wide);
        let out = r.allocate(2 * tokens * self.hidden);
        r.free(product);
        out
    }

    fn experts(&self, r: &mut Recorder, tokens: u64, (count, chosen): (u64, u64), shared: bool) -> usize {
        let narrow = (self.intermediate / 4).max(64);
        let logits = r.allocate(4 * tokens * count);
        let weights = r.allocate(4 * tokens * chosen);
        let ids = r.allocate(4 * tokens * chosen);
        r.free(logits);
        let common = shared.then(|| self.feed_forward(r, tokens));
        let order = r.allocate(4 * (tokens * chosen + count * 16));
        let wide = r.allocate(4 * tokens * chosen * narrow);
        let active = r.allocate(2 * tokens * chosen * narrow);
        r.free(wide);
        let each = r.allocate(2 * tokens * chosen * self.hidden);
        r.free(active);
        let out = r.allocate(2 * tokens * self.hidden);
        [each, order, weights, ids].iter().for_each(|id| r.free(*id));
        common.iter().for_each(|id| r.free(*id));
        out
    }
}
