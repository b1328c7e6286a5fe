//! Computed allocation traces: the structure of the recorded traces with other sizes.

use crate::{Event, Shape, Trace};

/// A decoder with random weights, as in the recorded traces. Sizes are in elements of two bytes.
#[derive(Clone, Copy, Debug)]
pub struct Model<'a> {
    /// Name of the trace.
    pub name: &'a str,
    /// Width between the layers.
    pub hidden: u64,
    /// Width within the feed-forward part.
    pub intermediate: u64,
    /// Heads of queries, and heads of keys (as many of values).
    pub heads: (u64, u64),
    /// Width of a head.
    pub head: u64,
    /// Number of layers.
    pub layers: u32,
    /// Length of the logits.
    pub vocabulary: u64,
    /// Batches of decode steps, with logits for every sequence.
    pub decode: &'a [u32],
    /// Tokens of prefill steps, with logits for the last token.
    pub prefill: &'a [u32],
}

#[derive(Default)]
pub(crate) struct Recorder {
    events: Vec<Event>,
    next: usize,
}

impl Recorder {
    pub(crate) fn allocate(&mut self, bytes: u64) -> usize {
        let id = self.next;
        self.next += 1;
        self.events.push(Event::Allocate { id, bytes });
        id
    }

    pub(crate) fn free(&mut self, id: usize) {
        self.events.push(Event::Free { id });
    }

    pub(crate) fn briefly(&mut self, bytes: u64) {
        let id = self.allocate(bytes);
        self.free(id);
    }

    pub(crate) fn shape(&mut self, kind: char, tokens: u32) -> Shape {
        Shape { kind, tokens, events: std::mem::take(&mut self.events) }
    }
}

impl Model<'_> {
    /// Returns the captures, small shapes first.
    #[must_use]
    pub fn trace(&self) -> Trace {
        let decode = self.decode.iter().map(|tokens| self.shape('d', *tokens));
        let prefill = self.prefill.iter().map(|tokens| self.shape('p', *tokens));
        Trace { name: self.name.to_owned(), shapes: decode.chain(prefill).collect() }
    }

    fn shape(&self, kind: char, tokens: u32) -> Shape {
        let (t, r) = (u64::from(tokens), &mut Recorder::default());
        let hidden = 2 * t * self.hidden;
        let qkv = 2 * t * (self.heads.0 + 2 * self.heads.1) * self.head;
        let query = 2 * t * self.heads.0 * self.head;
        let mut residual = r.allocate(hidden);
        let mut normed = r.allocate(hidden);
        r.briefly(4 * t);
        let mut before: Option<(usize, usize)> = None;
        for layer in 0..self.layers {
            let projected = r.allocate(qkv);
            before.iter().for_each(|(projected, _)| r.free(*projected));
            let seeds = [r.allocate(8), r.allocate(8)];
            let attended = r.allocate(query);
            if kind == 'p' {
                r.briefly(256);
            }
            seeds.iter().for_each(|seed| r.free(*seed));
            before.iter().for_each(|(_, attended)| r.free(*attended));
            before = Some((projected, attended));
            let output = r.allocate(hidden);
            let sum = r.allocate(hidden);
            r.free(output);
            r.free(residual);
            let second = r.allocate(hidden);
            r.briefly(4 * t);
            let wide = r.allocate(4 * t * self.intermediate);
            let gate = r.allocate(2 * t * self.intermediate);
            let product = r.allocate(2 * t * self.intermediate);
            r.free(gate);
            let down = r.allocate(hidden);
            [product, second, wide].iter().for_each(|id| r.free(*id));
            residual = r.allocate(hidden);
            r.free(down);
            r.free(sum);
            let next = r.allocate(hidden);
            r.briefly(4 * t);
            if layer + 1 == self.layers {
                r.free(residual);
            }
            r.free(normed);
            normed = next;
        }
        let rows = if kind == 'd' { t } else { 1 };
        let logits = r.allocate(2 * rows * self.vocabulary);
        let wide = r.allocate(4 * rows * self.vocabulary);
        r.free(logits);
        r.free(normed);
        before
            .iter()
            .for_each(|(projected, attended)| [projected, attended].iter().for_each(|id| r.free(**id)));
        r.free(wide);
        r.shape(kind, tokens)
    }
}
