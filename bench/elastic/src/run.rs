//! Runs one traffic through one memory policy.

use std::sync::Arc;

use vmmgraph::driver::HostDriver;
use vmmgraph::policy::Lengths;
use vmmgraph::{HostOptions, KvLayout, Result};

use crate::engine::{Admit, Engine, Rules, Slo};
use crate::memory::{Counted, Lent, Memory, Paged, Settings, Way};
use crate::metrics::Outcome;
use crate::model::{GIB, Model, Ns};
use crate::traffic::Request;

/// Memory policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A fixed split of the budget, with activations for the longest prompt.
    Static,
    /// The best of several fixed splits; may refuse long prompts.
    Refusing,
    /// Maps on demand, never ahead.
    OnDemand,
    /// The library's policies without work ahead.
    NothingAhead,
    /// The library's policies.
    Policies,
    /// The library's policies with leases.
    Lending,
    /// Knows output lengths and uses the best schedule found; mapping is free.
    Oracle,
}

impl Kind {
    /// All policies, from worst to best expectation.
    pub const ALL: [Self; 7] = [
        Self::Static,
        Self::Refusing,
        Self::OnDemand,
        Self::NothingAhead,
        Self::Policies,
        Self::Lending,
        Self::Oracle,
    ];

    /// Name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Static => "static split",
            Self::Refusing => "best static split",
            Self::OnDemand => "on demand",
            Self::NothingAhead => "policies, nothing ahead",
            Self::Policies => "policies",
            Self::Lending => "policies, by leases",
            Self::Oracle => "oracle",
        }
    }
}

/// Common setup of all runs.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The model on its device.
    pub model: Model,
    /// Service level objective.
    pub slo: Slo,
    /// Bytes for KV and activations.
    pub budget: u64,
    /// Host memory for waiting sequences, used by the policies and the oracle.
    pub host_bytes: u64,
    /// Layout of the KV cache.
    pub layout: KvLayout,
    /// Checks all invariants after every event.
    pub audit: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            model: Model::default(),
            slo: Slo::default(),
            budget: 12 * GIB,
            host_bytes: 32 * GIB,
            layout: KvLayout::ByBlock,
            audit: true,
        }
    }
}

const PATIENCE: Ns = 60_000_000_000;

impl Setup {
    /// Rules of the library's policies.
    ///
    /// # Errors
    /// None with these numbers.
    pub fn policies(&self) -> Result<Rules> {
        Ok(Rules {
            admit: Admit::Predicted(Box::new(Lengths::new(512, 700, 256)?)),
            host_bytes: self.host_bytes,
            control: true,
            overtakes: 16,
            spare: 0,
            patience: Some(PATIENCE),
            long_last: u64::MAX,
            pace: true,
        })
    }

    fn now(&self) -> Rules {
        let spare = self.budget / self.model.block_bytes() / 100;
        Rules {
            admit: Admit::Now(spare),
            host_bytes: 0,
            control: false,
            overtakes: 0,
            spare: 0,
            patience: None,
            long_last: u64::MAX,
            pace: false,
        }
    }

    fn paged(&self, way: Way) -> Result<Paged> {
        let driver = HostDriver::new(0, HostOptions { memory_bytes: self.budget, ..HostOptions::default() })?;
        Paged::new(Arc::new(driver), &self.model, self.budget, self.layout, way)
    }

    fn serve(
        &self,
        memory: &mut dyn Memory,
        rules: Rules,
        requests: &[Request],
        progress: &mut dyn FnMut(usize),
    ) -> Result<Outcome> {
        let mut engine = Engine::new(&self.model, self.slo, rules, memory)?;
        engine.audit = self.audit;
        engine.run(requests, progress)
    }

    /// Runs the requests. Reports the number of finished ones.
    ///
    /// # Errors
    /// A violated invariant, or an error of the library.
    pub fn run(&self, kind: Kind, requests: &[Request], progress: &mut dyn FnMut(usize)) -> Result<Outcome> {
        let mut best: Option<Outcome> = None;
        let mut better = |outcome: Outcome| {
            if best.as_ref().is_none_or(|best| outcome.good() > best.good()) {
                best = Some(outcome);
            }
        };
        match kind {
            Kind::Static | Kind::Refusing => {
                let mut splits = self.splits(requests);
                if kind == Kind::Static {
                    splits.drain(..splits.len() - 1);
                }
                for tokens in splits {
                    let way = Way::Static(self.model.activations(tokens, 0));
                    better(self.serve(&mut self.paged(way)?, self.now(), requests, progress)?);
                }
            }
            Kind::OnDemand => {
                better(self.serve(&mut self.paged(Way::OnDemand)?, self.now(), requests, progress)?)
            }
            Kind::NothingAhead => {
                better(self.serve(&mut self.paged(Way::OnDemand)?, self.policies()?, requests, progress)?)
            }
            Kind::Policies => {
                let mut memory = self.paged(Way::Policies(Settings::default()))?;
                better(self.serve(&mut memory, self.policies()?, requests, progress)?);
            }
            Kind::Lending => {
                let longest = self.splits(requests).pop().unwrap_or(0);
                let driver =
                    HostDriver::new(0, HostOptions { memory_bytes: self.budget, ..HostOptions::default() })?;
                let longest = self.model.activations(longest, 0);
                let mut memory =
                    Lent::new(Arc::new(driver), &self.model, self.budget, longest, Settings::default())?;
                better(self.serve(&mut memory, self.policies()?, requests, progress)?);
            }
            Kind::Oracle => {
                let capacity = self.budget / self.model.block_bytes();
                let as_they_do = Rules { admit: Admit::Known, ..self.policies()? };
                let mut tried = vec![as_they_do, self.policies()?];
                for host_bytes in [0, self.host_bytes / 8, self.host_bytes] {
                    for patience in [None, Some(PATIENCE), Some(Ns::MAX / 4)] {
                        let plain = (0, u64::MAX);
                        for (spare, long_last) in [plain, (capacity / 8, u64::MAX), (0, 8192), (0, 2048)] {
                            let (admit, control, overtakes) = (Admit::Known, false, 16);
                            for pace in [false, true] {
                                tried.push(Rules {
                                    admit: admit.clone(),
                                    host_bytes,
                                    control,
                                    overtakes,
                                    spare,
                                    patience,
                                    long_last,
                                    pace,
                                });
                            }
                        }
                    }
                }
                for rules in tried {
                    let mut memory = Counted::new(self.budget, self.model.block_bytes());
                    better(self.serve(&mut memory, rules, requests, progress)?);
                }
            }
        }
        Ok(best.unwrap_or_default())
    }

    /// Activation sizes, in tokens, of the fixed splits: one step, the longest prompt, and a value
    /// between.
    fn splits(&self, requests: &[Request]) -> Vec<u64> {
        let prompts = requests.iter().map(|request| request.prompt);
        let longest = prompts.max().unwrap_or(0).min(self.model.longest_prompt).max(self.model.step_tokens);
        let step = self.model.step_tokens;
        let mut all = vec![step, (step + longest) / 2, longest];
        all.dedup();
        all
    }
}
