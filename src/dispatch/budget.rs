//! Limits on the number of graphs.

use crate::error::{Error, Result};

/// Streams of an Ascend device for captures: 2048 less a reserve of 248.
pub const ACL_GRAPH_STREAMS: u32 = 1800;

/// Number of ACL graphs by vLLM-Ascend's formula, `update_aclgraph_sizes`
/// (vllm-project/vllm-ascend, `vllm_ascend/utils.py`). A piecewise graph needs one stream per piece
/// (one per layer, and one more), multiplied by a factor for communication:
///
/// ```text
///   AIV expansion: (streams - reserve) / pieces / (1 + groups + extra)
///   otherwise: (streams - 40 * groups - 100 * context_groups) / pieces / (1 + 2 * groups)
/// ```
///
/// Later AIV versions reserve, for dense models, the streams of one graph
/// ([`reserve_one`](Self::reserve_one)); newer releases let a capture fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AclGraphStreams {
    /// Streams for captures; default [`ACL_GRAPH_STREAMS`].
    pub streams: u32,
    /// Hidden layers of the model.
    pub layers: u32,
    /// Hidden layers of the draft model, if any.
    pub draft_layers: Option<u32>,
    /// How many of the data-parallel and tensor-parallel sizes exceed 1.
    pub groups: u32,
    /// `HCCL_OP_EXPANSION_MODE` is `AIV`.
    pub aiv: bool,
    /// AIV only: further concurrent streams (1 each for expert parallelism, an overlapped shared
    /// expert, data parallelism of a mixture-of-experts model).
    pub extra: u32,
    /// AIV only: reserve the streams of one graph.
    pub reserve_one: bool,
    /// Without AIV: how many of the prefill and decode context-parallel sizes exceed 1.
    pub context_groups: u32,
}

impl AclGraphStreams {
    /// Creates the parameters of a dense model without draft model or context parallelism.
    #[must_use]
    pub fn new(layers: u32, data_parallel: u32, tensor_parallel: u32, aiv: bool) -> Self {
        let groups = u32::from(data_parallel > 1) + u32::from(tensor_parallel > 1);
        Self {
            streams: ACL_GRAPH_STREAMS,
            layers,
            draft_layers: None,
            groups,
            aiv,
            extra: 0,
            reserve_one: false,
            context_groups: 0,
        }
    }

    /// Returns the maximum number of graphs; 0 if none fits.
    #[must_use]
    pub fn max_graphs(&self) -> u32 {
        let (streams, groups) = (u64::from(self.streams), u64::from(self.groups));
        let pieces = u64::from(self.layers) + 1 + self.draft_layers.map_or(0, |layers| u64::from(layers) + 1);
        let (reserve, factor) = if self.aiv {
            let factor = 1 + groups + u64::from(self.extra);
            (if self.reserve_one { factor.saturating_mul(pieces) } else { 0 }, factor)
        } else {
            (40 * groups + 100 * u64::from(self.context_groups), 1 + 2 * groups)
        };
        (streams.saturating_sub(reserve) / pieces / factor) as u32
    }
}

/// Limits of graphs. `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Number of graphs.
    pub graphs: Option<u32>,
    /// Streams of an Ascend device.
    pub streams: Option<AclGraphStreams>,
    /// Bytes private to each graph.
    pub graph_bytes: Option<u64>,
    /// Bytes of the arena's shared pages, set by the peak shape.
    pub pool_bytes: Option<u64>,
}

/// Memory and time costs, measured by the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Bytes added by each graph: executable, live-out blocks.
    pub graph_bytes: u64,
    /// Bytes of shared pages of the smallest graph.
    pub pool_base_bytes: u64,
    /// Bytes of shared pages per unit of bucket weight.
    pub pool_unit_bytes: u64,
    /// Cost of an eager step, in the unit of padding; by default above any padding.
    pub eager_step: u64,
}

impl Default for Costs {
    fn default() -> Self {
        Self { graph_bytes: 0, pool_base_bytes: 0, pool_unit_bytes: 0, eager_step: 1 << 52 }
    }
}

/// Part of a [`Budget`] which limits the number of graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LimitedBy {
    /// No limit.
    Nothing = 0,
    /// [`Budget::graphs`].
    Graphs = 1,
    /// [`Budget::streams`].
    Streams = 2,
    /// [`Budget::graph_bytes`].
    GraphBytes = 3,
}

/// Result of applying a [`Budget`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Maximum number of graphs.
    pub graphs: u32,
    /// Limiting part of the budget.
    pub by: LimitedBy,
    /// Weight of the heaviest bucket which fits the pool, if any.
    pub weight: Option<u64>,
}

impl Budget {
    /// Returns the maximum number of graphs and the heaviest bucket.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a byte limit whose cost is zero.
    pub fn limit(&self, costs: &Costs) -> Result<Limit> {
        let zero = |what| {
            let expected = "above zero where the budget limits it";
            Err(Error::InvalidArgument { what, value: 0, expected })
        };
        let mut limit = Limit { graphs: u32::MAX, by: LimitedBy::Nothing, weight: Some(u64::MAX) };
        let mut lower = |graphs: u32, by| {
            if graphs < limit.graphs {
                (limit.graphs, limit.by) = (graphs, by);
            }
        };
        if let Some(graphs) = self.graphs {
            lower(graphs, LimitedBy::Graphs);
        }
        if let Some(streams) = self.streams {
            lower(streams.max_graphs(), LimitedBy::Streams);
        }
        if let Some(bytes) = self.graph_bytes {
            let Some(graphs) = bytes.checked_div(costs.graph_bytes) else { return zero("bytes of a graph") };
            lower(u32::try_from(graphs).unwrap_or(u32::MAX), LimitedBy::GraphBytes);
        }
        if let Some(bytes) = self.pool_bytes {
            if costs.pool_unit_bytes == 0 {
                return zero("pool bytes of a unit of weight");
            }
            limit.weight = bytes.checked_sub(costs.pool_base_bytes).map(|room| room / costs.pool_unit_bytes);
        }
        Ok(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worked_example_of_vllm_ascend() {
        let aiv = AclGraphStreams { streams: 1920, ..AclGraphStreams::new(48, 1, 4, true) };
        let other = AclGraphStreams { streams: 1920, ..AclGraphStreams::new(48, 1, 4, false) };
        assert_eq!((aiv.max_graphs(), other.max_graphs()), (19, 12));
        assert_eq!(AclGraphStreams::new(48, 1, 4, true).max_graphs(), 18);
        assert_eq!(AclGraphStreams::new(48, 1, 4, false).max_graphs(), 11);
        assert_eq!(AclGraphStreams { reserve_one: true, ..aiv }.max_graphs(), 18);
    }

    #[test]
    fn every_parameter_of_the_stream_formula_counts() {
        let aiv = AclGraphStreams::new(48, 1, 4, true);
        assert_eq!(AclGraphStreams::new(48, 1, 1, true).max_graphs(), 1800 / 49);
        assert_eq!(AclGraphStreams::new(48, 2, 4, true).max_graphs(), 1800 / 49 / 3);
        assert_eq!(AclGraphStreams { extra: 2, ..aiv }.max_graphs(), 1800 / 49 / 4);
        assert_eq!(AclGraphStreams { draft_layers: Some(1), ..aiv }.max_graphs(), 1800 / 51 / 2);
        let other = AclGraphStreams::new(48, 2, 4, false);
        assert_eq!(other.max_graphs(), (1800 - 80) / 49 / 5);
        assert_eq!(AclGraphStreams { context_groups: 2, ..other }.max_graphs(), (1800 - 280) / 49 / 5);
        assert_eq!(AclGraphStreams { groups: u32::MAX, ..other }.max_graphs(), 0);
        assert_eq!(AclGraphStreams { layers: u32::MAX, ..aiv }.max_graphs(), 0);
    }

    #[test]
    fn the_tightest_part_of_a_budget_decides() {
        let costs = Costs { graph_bytes: 10, pool_base_bytes: 100, pool_unit_bytes: 3, ..Costs::default() };
        let none = Budget::default().limit(&costs).unwrap();
        assert_eq!(none, Limit { graphs: u32::MAX, by: LimitedBy::Nothing, weight: Some(u64::MAX) });
        let budget =
            Budget { graphs: Some(20), graph_bytes: Some(199), pool_bytes: Some(108), ..Budget::default() };
        assert_eq!(
            budget.limit(&costs).unwrap(),
            Limit { graphs: 19, by: LimitedBy::GraphBytes, weight: Some(2) }
        );
        let budget = Budget { streams: Some(AclGraphStreams::new(48, 1, 4, true)), ..budget };
        assert_eq!(budget.limit(&costs).unwrap().by, LimitedBy::Streams);
        assert_eq!(Budget { pool_bytes: Some(99), ..budget }.limit(&costs).unwrap().weight, None);
        assert!(budget.limit(&Costs::default()).is_err());
    }
}
