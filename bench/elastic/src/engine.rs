//! Serving engine in virtual time: prefill steps over whole prompts, then decode steps of one token
//! per running sequence.

use std::collections::VecDeque;

use vmmgraph::policy::{
    Admission, Decoding, Due, Growing, HostKv, Lengths, Prompt, SloControl, deadline_order, prefill_waits,
};
use vmmgraph::{Error, Result};

use crate::memory::{Hint, Memory};
use crate::metrics::Outcome;
use crate::model::{GIB, Model, Ns};
use crate::traffic::Request;

const SECOND: Ns = 1_000_000_000;
const TICK: Ns = 10_000_000;
/// Number of idle ticks after which the memory no longer changes.
const TICKS: u64 = 600;
const PREFILL: u64 = 0;
const FETCH: u64 = 1;
const LOOK: usize = 64;

/// Service level objective of a request.
#[derive(Clone, Copy, Debug)]
pub struct Slo {
    /// Maximum time to the first token: this, plus `first_times` the prompt's prefill time.
    pub first: Ns,
    /// See [`first`](Self::first).
    pub first_times: f64,
    /// Maximum average time per further token.
    pub other: Ns,
}

impl Default for Slo {
    fn default() -> Self {
        Self { first: SECOND, first_times: 3.0, other: SECOND / 10 }
    }
}

/// Admission rule.
#[derive(Clone, Debug)]
pub enum Admit {
    /// Admits requests that fit now with this many spare blocks; preempts later if needed.
    Now(u64),
    /// Admits requests predicted to fit until their end.
    Predicted(Box<Lengths>),
    /// The same with known output lengths.
    Known,
}

/// Scheduling rules of the engine.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Admission rule.
    pub admit: Admit,
    /// Bytes of host memory for KV of waiting sequences; 0: none.
    pub host_bytes: u64,
    /// Whether the service level limits the used host memory.
    pub control: bool,
    /// Limit on overtaking one request; 0: never.
    pub overtakes: u64,
    /// Blocks reserved for activations of later prompts, with predicted lengths.
    pub spare: u64,
    /// `Some`: most prompts meet their deadline, and late ones wait at most this long. `None`:
    /// first come, first served.
    pub patience: Option<Ns>,
    /// Prompts with more tokens than this are served last.
    pub long_last: u64,
    /// Whether prompts wait for decoding while not urgent.
    pub pace: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    /// The KV is on the host and can be fetched from this time on.
    Parked(Ns),
    /// The KV is being copied back until this time.
    Fetching(Ns),
    Running,
    Over,
}

#[derive(Clone, Debug)]
struct Sequence {
    request: Request,
    phase: Phase,
    /// Generated tokens, including tokens before a preemption.
    generated: u64,
    blocks: Vec<u64>,
    first: Option<Ns>,
    overtaken: u64,
    /// True if the request had to wait for memory.
    queued: bool,
}

impl Sequence {
    fn tokens(&self) -> u64 {
        self.request.prompt + self.generated
    }
}

/// Runs requests through a memory.
pub struct Engine<'a> {
    model: &'a Model,
    slo: Slo,
    rules: Rules,
    memory: &'a mut dyn Memory,
    host: HostKv,
    control: SloControl,
    admission: Admission,
    all: Vec<Sequence>,
    waiting: VecDeque<usize>,
    parked: VecDeque<usize>,
    fetching: Vec<usize>,
    running: Vec<usize>,
    now: Ns,
    /// Time at which each direction of the host link is free.
    link: [Ns; 2],
    outcome: Outcome,
    /// Checks all invariants after every event.
    pub audit: bool,
}

struct Batch {
    members: Vec<(usize, bool)>,
    tokens: u64,
    to_host: u64,
    blocks: u64,
    growing: Vec<Growing>,
}

impl<'a> Engine<'a> {
    /// Makes an idle engine.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for empty blocks.
    pub fn new(model: &'a Model, slo: Slo, rules: Rules, memory: &'a mut dyn Memory) -> Result<Self> {
        let most = rules.host_bytes.max(1);
        let mut host = HostKv::new(rules.host_bytes);
        let first = if rules.control { (most / 4).max(1) } else { most };
        host.set_logical(first);
        Ok(Self {
            host,
            control: SloControl::new((GIB / 4).min(first), first, most)?,
            admission: Admission::new(model.block_tokens)?,
            model,
            slo,
            rules,
            memory,
            all: Vec::new(),
            waiting: VecDeque::new(),
            parked: VecDeque::new(),
            fetching: Vec::new(),
            running: Vec::new(),
            now: 0,
            link: [0; 2],
            outcome: Outcome::default(),
            audit: true,
        })
    }

    /// Serves requests in order of arrival; reports the number of finished ones after each step.
    ///
    /// # Errors
    /// A violated invariant.
    pub fn run(mut self, requests: &[Request], mut progress: impl FnMut(usize)) -> Result<Outcome> {
        let mut next = 0;
        let mut idle = 0;
        let mut over = 0;
        self.memory.ahead(0, &Hint::default());
        loop {
            while let Some(request) = requests.get(next).filter(|request| request.arrival <= self.now) {
                self.arrive(*request);
                next += 1;
                self.checked()?;
            }
            self.fetch();
            let worked = self.prefill()? || self.decode()?;
            self.checked()?;
            if worked {
                idle = 0;
                let done = self.outcome.requests.len();
                if done > over {
                    progress(done);
                    over = done;
                }
                continue;
            }
            let copies =
                self.fetching.iter().chain(&self.parked).filter_map(|who| match self.all.get(*who)?.phase {
                    Phase::Fetching(at) | Phase::Parked(at) => Some(at),
                    _ => None,
                });
            let copied = copies.filter(|at| *at > self.now).min();
            let arrives = requests.get(next).map(|request| request.arrival);
            let Some(at) = copied.into_iter().chain(arrives).min() else {
                if self.waiting.is_empty() && self.parked.is_empty() && self.fetching.is_empty() {
                    break;
                }
                let left = (self.waiting.len(), self.parked.len(), self.fetching.len());
                return Err(Error::Internal {
                    what: format!("waiting, parked, fetching: {left:?} for ever"),
                });
            };
            if idle < TICKS && at > self.now + TICK {
                idle += 1;
                self.now += TICK;
                let hint = Hint { until: self.now + TICK, ..Hint::default() };
                self.memory.ahead(self.now, &hint);
            } else {
                self.now = at;
            }
        }
        self.outcome.span = requests.last().map_or(0, |last| last.arrival).max(1);
        self.outcome.end = self.now;
        self.outcome.moves = self.memory.moves();
        Ok(self.outcome)
    }

    fn checked(&mut self) -> Result<()> {
        if !self.audit {
            return Ok(());
        }
        self.outcome.checks += 1;
        self.memory.check(&mut self.all.iter().flat_map(|one| one.blocks.iter().copied()))?;
        let holds = |one: &Sequence| matches!(one.phase, Phase::Running | Phase::Fetching(_));
        let wrong = self.all.iter().enumerate().find(|(_, one)| one.blocks.is_empty() == holds(one));
        if let Some((who, one)) = wrong {
            return Err(Error::Internal { what: format!("request {who}: {one:?}") });
        }
        if self.host.held() > self.rules.host_bytes {
            return Err(Error::Internal { what: format!("{} bytes on the host", self.host.held()) });
        }
        Ok(())
    }

    fn arrive(&mut self, request: Request) {
        let who = self.all.len();
        let one = Sequence {
            request,
            phase: Phase::Waiting,
            generated: 0,
            blocks: Vec::new(),
            first: None,
            overtaken: 0,
            queued: false,
        };
        self.all.push(one);
        let activations = self.model.activations(request.prompt, 0);
        let blocks = self.model.blocks(request.prompt + 1);
        // Refuse requests that do not fit even alone.
        if request.prompt > self.model.longest_prompt || !self.memory.possible(activations, blocks) {
            self.refuse(who);
        } else {
            self.waiting.push_back(who);
        }
    }

    fn refuse(&mut self, who: usize) {
        if let Some(one) = self.all.get_mut(who) {
            one.phase = Phase::Over;
            self.outcome.refused += 1;
            self.outcome.over(&one.request, None, self.now, false, one.queued);
        }
    }

    fn deadline(&self, request: &Request) -> Ns {
        let own = self.model.prefill(std::iter::once(request.prompt)) as f64;
        request.arrival + self.slo.first + (self.slo.first_times * own) as Ns
    }

    /// Tokens still to generate, as far as the engine knows.
    fn left(&self, one: &Sequence) -> u64 {
        let total = match &self.rules.admit {
            Admit::Known => one.request.output,
            Admit::Predicted(lengths) => lengths.total(one.generated),
            Admit::Now(_) => one.generated,
        };
        total.saturating_sub(one.generated)
    }

    fn growing(&self) -> Vec<Growing> {
        let holding = self.running.iter().chain(&self.fetching).filter_map(|who| self.all.get(*who));
        holding.map(|one| Growing { tokens: one.tokens(), left: self.left(one) }).collect()
    }

    /// Returns whether one more sequence may start.
    fn admits(&self, growing: &[Growing], one: &Sequence, blocks: u64, room: u64) -> bool {
        if blocks > room {
            return false;
        }
        match &self.rules.admit {
            Admit::Now(spare) => blocks + spare <= room || growing.is_empty(),
            Admit::Predicted(_) | Admit::Known => {
                let more = Growing { tokens: one.tokens() + 1, left: self.left(one).saturating_sub(1) };
                // A single sequence may always start: it was not refused on arrival.
                growing.is_empty()
                    || self.admission.fits(
                        growing,
                        more,
                        self.memory.capacity().saturating_sub(self.rules.spare),
                    )
            }
        }
    }

    fn fetch(&mut self) {
        let now = self.now;
        let (all, running) = (&self.all, &mut self.running);
        self.fetching.retain(|who| {
            let there =
                matches!(all.get(*who).map(|one| &one.phase), Some(Phase::Fetching(at)) if *at <= now);
            if there {
                running.push(*who);
            }
            !there
        });
        for who in &self.running {
            if let Some(one) = self.all.get_mut(*who) {
                one.phase = Phase::Running;
            }
        }
        if self.parked.is_empty() {
            self.memory.forget(FETCH);
            return;
        }
        let mut growing = self.growing();
        let mut passed = Vec::new();
        let mut place = 0;
        while let Some(who) = self.parked.get(place).copied() {
            let Some(one) = self.all.get(who) else { break };
            let ready = matches!(one.phase, Phase::Parked(at) if at <= now);
            let blocks = self.model.blocks(one.tokens() + 1);
            let full = self.running.len() + self.fetching.len() >= self.model.batch;
            let fits = ready && !full && self.admits(&growing, one, blocks, self.memory.room(0));
            let granted = fits && self.memory.grant(now, FETCH, 0, blocks).is_some();
            if !granted {
                let stop = full || (ready && one.overtaken >= self.rules.overtakes);
                if stop || place >= LOOK {
                    break;
                }
                passed.push(who);
                place += 1;
                continue;
            }
            growing.push(Growing { tokens: one.tokens() + 1, left: self.left(one) });
            let taken = self.memory.allocate(blocks);
            let bytes = self.host.take(who as u64).unwrap_or(0);
            let [link, _] = &mut self.link;
            *link = (*link).max(now) + self.model.copy(bytes);
            let at = *link;
            if let Some(one) = self.all.get_mut(who) {
                (one.blocks, one.phase) = (taken, Phase::Fetching(at));
            }
            self.parked.remove(place);
            self.fetching.push(who);
            for other in &passed {
                if let Some(other) = self.all.get_mut(*other) {
                    other.overtaken += 1;
                }
            }
        }
    }

    fn prompt(&self, one: &Sequence) -> Prompt {
        let takes = self.model.prefill(std::iter::once(one.tokens()));
        // Preempted sequences are served first.
        let patience = match self.rules.patience {
            _ if one.first.is_some() => 0,
            Some(patience) => one.request.arrival.saturating_add(patience),
            None => Ns::MAX,
        };
        Prompt { since: one.request.arrival, due: Due { by: self.deadline(&one.request), takes, patience } }
    }

    /// Returns whether the next step should decode.
    fn waits(&self, batch: &Batch) -> bool {
        let members = || batch.members.iter().filter_map(|(who, _)| self.all.get(*who));
        let prompts: Vec<Prompt> = members().map(|one| self.prompt(one)).collect();
        let running = self.running.iter().filter_map(|who| self.all.get(*who));
        let decoding = |one: &Sequence| Decoding {
            since: one.first.unwrap_or(self.now),
            tokens: one.generated,
            each: self.slo.other,
        };
        let takes = self.model.prefill(members().map(Sequence::tokens));
        prefill_waits(self.now, takes, &prompts, &running.map(decoding).collect::<Vec<_>>())
    }

    fn order(&self) -> (Vec<usize>, usize) {
        let mut order: Vec<usize> = self.waiting.iter().copied().collect();
        let mut together = order.len();
        if self.rules.patience.is_some() {
            let all: Vec<Due> =
                order.iter().filter_map(|who| Some(self.prompt(self.all.get(*who)?).due)).collect();
            let (turns, timely) = deadline_order(self.now, &all);
            order = turns.into_iter().filter_map(|at| self.waiting.get(at).copied()).collect();
            together = timely;
        }
        let long =
            |who: &usize| self.all.get(*who).is_some_and(|one| one.request.prompt > self.rules.long_last);
        order.sort_by_key(long);
        (order, together)
    }

    fn batch(&mut self) -> Option<Batch> {
        let mut batch =
            Batch { members: Vec::new(), tokens: 0, to_host: 0, blocks: 0, growing: self.growing() };
        let mut passed = Vec::new();
        let mut host = self.host.clone();
        let under_way = self.running.len() + self.fetching.len();
        let (order, together) = self.order();
        for (place, who) in order.into_iter().enumerate().take(LOOK) {
            let Some(one) = self.all.get(who) else { continue };
            // A late prompt must not delay others.
            if place >= together && !batch.members.is_empty() {
                break;
            }
            let tokens = one.tokens();
            if !batch.members.is_empty() && batch.tokens + tokens > self.model.step_tokens {
                break;
            }
            let blocks = self.model.blocks(tokens + 1);
            let room = self.memory.room(self.model.activations(batch.tokens + tokens, batch.to_host));
            let seats = under_way + batch.members.iter().filter(|(_, runs)| *runs).count() < self.model.batch;
            // Parked sequences have priority.
            let turn = self.parked.is_empty() || one.first.is_some();
            if seats && turn && self.admits(&batch.growing, one, batch.blocks + blocks, room) {
                batch.growing.push(Growing { tokens: tokens + 1, left: self.left(one) });
                batch.blocks += blocks;
                batch.members.push((who, true));
            } else {
                let bytes = blocks * self.model.block_bytes();
                let activations = self.model.activations(batch.tokens + tokens, batch.to_host + tokens);
                let fits =
                    self.memory.room(activations) >= batch.blocks && activations <= self.memory.longest();
                let goes = !self.rules.pace || self.prompt(one).to_host(self.now);
                if fits && goes && host.put(who as u64, bytes) {
                    batch.to_host += tokens;
                    batch.members.push((who, false));
                } else {
                    passed.push(who);
                    if one.overtaken >= self.rules.overtakes {
                        break;
                    }
                    continue;
                }
            }
            batch.tokens += tokens;
        }
        for who in &passed {
            if let Some(one) = self.all.get_mut(*who) {
                one.queued = true;
            }
        }
        let first = batch.members.first()?.0;
        let overtaken: Vec<usize> = passed.into_iter().filter(|who| *who < first).collect();
        for who in overtaken {
            if let Some(one) = self.all.get_mut(who) {
                one.overtaken += 1;
            }
        }
        Some(batch)
    }

    fn prefill(&mut self) -> Result<bool> {
        let Some(batch) = self.batch() else {
            self.memory.forget(PREFILL);
            return Ok(false);
        };
        if self.rules.pace && self.waits(&batch) {
            self.memory.forget(PREFILL);
            return Ok(false);
        }
        let activations = self.model.activations(batch.tokens, batch.to_host);
        let Some(exposed) = self.memory.grant(self.now, PREFILL, activations, batch.blocks) else {
            self.outcome.waits += 1;
            return Ok(false);
        };
        let mut prompts = Vec::new();
        for (who, runs) in &batch.members {
            self.waiting.retain(|other| other != who);
            let Some(one) = self.all.get_mut(*who) else { continue };
            prompts.push(one.tokens());
            let blocks = self.model.blocks(one.tokens() + 1);
            if *runs {
                one.blocks = self.memory.allocate(blocks);
                one.phase = Phase::Running;
            } else {
                self.host.put(*who as u64, blocks * self.model.block_bytes());
                self.outcome.parked += 1;
            }
        }
        // KV moves to the host layer by layer during the computation: the longer of both times
        // counts.
        let out = self.model.copy(batch.to_host * 2 * self.model.layers * self.model.plane_token_bytes);
        let takes = self.model.prefill(prompts.into_iter()).max(out);
        self.checked()?;
        self.step(exposed, takes);
        self.memory.step_over(self.now);
        let mut late = false;
        for (who, runs) in batch.members {
            let due = self.all.get(who).map_or(0, |one| self.deadline(&one.request));
            let Some(one) = self.all.get_mut(who) else { continue };
            if one.first.is_none() {
                late |= self.now > due;
                one.first = Some(self.now);
            }
            one.generated += 1;
            if runs {
                self.running.push(who);
            } else {
                one.phase = Phase::Parked(self.now);
                self.parked.push_back(who);
            }
            self.end_if_over(who);
        }
        self.control(late);
        Ok(true)
    }

    fn decode(&mut self) -> Result<bool> {
        let mut stalled = 0;
        let exposed = loop {
            if self.running.is_empty() {
                return Ok(false);
            }
            let full = |who: &&usize| self.all.get(**who).is_some_and(|one| self.needs_block(one));
            let blocks = self.running.iter().filter(full).count() as u64;
            if let Some(exposed) = self.memory.extend(self.now, blocks) {
                break exposed;
            }
            stalled += self.preempt();
            self.checked()?;
        };
        let mut tokens = 0;
        for who in self.running.clone() {
            let needs = self.all.get(who).is_some_and(|one| self.needs_block(one));
            let more = if needs { self.memory.allocate(1) } else { Vec::new() };
            if let Some(one) = self.all.get_mut(who) {
                one.blocks.extend(more);
                tokens += one.tokens();
            }
        }
        self.checked()?;
        let takes = self.model.decode(self.running.len() as u64, tokens);
        self.step(exposed, takes + stalled);
        self.memory.step_over(self.now);
        for who in self.running.clone() {
            if let Some(one) = self.all.get_mut(who) {
                one.generated += 1;
            }
            self.end_if_over(who);
        }
        let head = self.waiting.front().and_then(|who| self.all.get(*who));
        let late = head.is_some_and(|one| one.first.is_none() && self.now > self.deadline(&one.request));
        self.control(late);
        Ok(true)
    }

    fn needs_block(&self, one: &Sequence) -> bool {
        self.model.blocks(one.tokens() + 1) > one.blocks.len() as u64
    }

    /// Preempts the latest sequence: its KV moves to the host or is recomputed later. Returns the
    /// time.
    fn preempt(&mut self) -> Ns {
        let last =
            self.running.iter().max_by_key(|who| self.all.get(**who).map(|one| (one.request.arrival, **who)));
        let Some(who) = last.copied() else { return 0 };
        self.running.retain(|other| *other != who);
        let Some(one) = self.all.get_mut(who) else { return 0 };
        let blocks = std::mem::take(&mut one.blocks);
        self.outcome.preempted += 1;
        one.queued = true;
        if self.running.is_empty() && self.fetching.is_empty() {
            self.memory.free(self.now, &blocks);
            self.refuse(who);
            return 0;
        }
        let bytes = blocks.len() as u64 * self.model.block_bytes();
        let mut takes = 0;
        if self.host.rescue(who as u64, bytes) {
            takes = self.model.copy(bytes);
            one.phase = Phase::Parked(self.now + takes);
            self.parked.push_front(who);
        } else {
            one.phase = Phase::Waiting;
            self.waiting.push_front(who);
        }
        self.memory.free(self.now, &blocks);
        takes
    }

    /// Runs a step on the device, with the library's background thread in parallel.
    fn step(&mut self, exposed: Ns, takes: Ns) {
        self.outcome.exposed.push(exposed);
        self.now += exposed;
        let until = self.now + takes;
        let mut hint = Hint { until, ..Hint::default() };
        let next = self.waiting.front().and_then(|who| self.all.get(*who));
        if let Some(one) = next {
            hint.activations = self.model.activations(one.tokens().max(self.soon()), 0);
            hint.blocks = self.model.blocks(one.tokens() + 1);
        }
        self.memory.ahead(self.now, &hint);
        self.now = until;
    }

    /// Tokens of the waiting prompts, up to one step.
    fn soon(&self) -> u64 {
        let mut tokens = 0;
        for one in self.waiting.iter().take(LOOK).filter_map(|who| self.all.get(*who)) {
            if tokens + one.tokens() > self.model.step_tokens {
                break;
            }
            tokens += one.tokens();
        }
        tokens
    }

    fn end_if_over(&mut self, who: usize) {
        let Some(one) = self.all.get_mut(who).filter(|one| one.generated >= one.request.output) else {
            return;
        };
        one.phase = Phase::Over;
        let (request, first, queued) = (one.request, one.first, one.queued);
        let blocks = std::mem::take(&mut one.blocks);
        self.running.retain(|other| *other != who);
        self.parked.retain(|other| *other != who);
        let _ = self.host.take(who as u64);
        if !blocks.is_empty() {
            self.memory.free(self.now, &blocks);
        }
        if let Admit::Predicted(lengths) = &mut self.rules.admit {
            lengths.ended(request.output);
        }
        let first = first.unwrap_or(self.now);
        let other = (self.now - first) / (request.output - 1).max(1);
        let good = first <= self.deadline(&request) && other <= self.slo.other;
        self.outcome.over(&request, Some(first), self.now, good, queued);
    }

    fn control(&mut self, first_late: bool) {
        if !self.rules.control {
            return;
        }
        let under_way = self.running.iter().chain(&self.parked).chain(&self.fetching);
        let (mut slow, mut all) = (0, 0);
        for one in under_way.filter_map(|who| self.all.get(*who)) {
            let since = self.now - one.first.unwrap_or(self.now);
            all += 1;
            // Too early to judge before the time of a few tokens.
            slow += u64::from(since > self.slo.other * one.generated.max(8));
        }
        let other_late = slow * 10 > all;
        self.control.step(first_late, other_late);
        self.host.set_logical(self.control.value());
    }
}
