//! Memory that cells of one host lend one another: requests for loans, their results, and the VMs that use
//! them.
//!
//! The count of two cells is theirs alone ([`protocol::grant`]). Each cell publishes the amounts that it has
//! lent in the table, which all cells have.

use std::collections::{BTreeMap, VecDeque};

use protocol::CellId;
use protocol::grant::{Amounts, Effect, Refusal};
use registry::cluster::interface::{CellResponse, LentMemory, RunningVm, VmPlacement, VmShare};

use super::view::{KnownCell, list};
use super::{Action, CellPayload, Client, State};

/// Clients that wait for a cell to receive memory or to give it back, in the order of its answers, each with
/// the bytes.
#[derive(Debug, Default)]
pub(super) struct Loans(BTreeMap<u16, VecDeque<(Client, u64)>>);

/// A VM's memory by home.
pub(super) fn parts(cell: u16, share: VmShare, borrowed: &[LentMemory]) -> Amounts {
    let others: u64 = borrowed.iter().map(|part| part.bytes).sum();
    let own = (cell, share.memory_bytes.saturating_sub(others));
    let others = borrowed.iter().map(|part| (part.cell, part.bytes));
    [own].into_iter().chain(others).collect()
}

/// The memory that the VMs of other cells have of this one.
pub(super) fn used(running: &[RunningVm], home: u16) -> Amounts {
    let mut used = Amounts::new();
    for vm in running {
        for part in vm.borrowed.iter().filter(|part| part.cell == home) {
            *used.entry(vm.cell).or_default() += part.bytes;
        }
    }
    // Each region once, whatever the number of its members, which may differ while its memory moves.
    let mut of_regions: BTreeMap<(&str, u16), u64> = BTreeMap::new();
    for region in running.iter().flat_map(|vm| &vm.regions) {
        for part in region.borrowed.iter().filter(|part| part.cell == home) {
            let bytes = of_regions.entry((&region.name, region.home)).or_default();
            *bytes = part.bytes.max(*bytes);
        }
    }
    for ((_, holder), bytes) in of_regions.into_iter().filter(|((_, holder), _)| *holder != home) {
        *used.entry(holder).or_default() += bytes;
    }
    used
}

/// A reason why memory is not lent or recalled, with the help.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum LoanError {
    #[error("cell {0} is only starting; try again in a moment")]
    Starting(u16),
    #[error("nothing is to be lent; name an amount, as 512M")]
    Nothing,
    #[error("cell {0} has its own memory already; name two cells")]
    OneCell(u16),
    #[error("there is no cell {other}; there is {known}")]
    NoCell { other: u16, known: String },
    #[error("cells {me} and {other} are on different hosts; memory is lent within a host only")]
    OtherHost { me: u16, other: u16 },
    #[error("cell {0} does not run; try again when `mirrorball cluster status` shows that it does")]
    NotMet(u16),
    #[error("cell {me} has only {free_mib} MiB that no VM uses; lend less, or end a VM there")]
    Short { me: u16, free_mib: u64 },
    #[error("cell {other} has only {lent_mib} MiB of cell {me}'s memory; reclaim at most that")]
    ShortLoan { me: u16, other: u16, lent_mib: u64 },
}

impl State {
    pub(super) fn lend(&mut self, client: Client, to: u16, bytes: u64) -> Vec<Action> {
        let given = self.check_loan(to, bytes).and_then(|()| {
            self.ledger
                .give(to, bytes)
                .map_err(|refusal| self.why(refusal, to))
        });
        self.began(client, to, bytes, given)
    }

    pub(super) fn reclaim(&mut self, client: Client, from: u16, bytes: u64) -> Vec<Action> {
        let recalled = self.check_loan(from, bytes).and_then(|()| {
            let recalled = self.ledger.recall(from, bytes);
            recalled.map_err(|refusal| match refusal {
                Refusal::Short(lent) => LoanError::ShortLoan {
                    me: self.me.number,
                    other: from,
                    lent_mib: lent >> 20,
                },
                Refusal::NotMet => self.why(refusal, from),
            })
        });
        self.began(client, from, bytes, recalled)
    }

    fn began(
        &mut self,
        client: Client,
        other: u16,
        bytes: u64,
        effects: Result<Vec<Effect>, LoanError>,
    ) -> Vec<Action> {
        match effects {
            Ok(effects) => {
                self.loans.0.entry(other).or_default().push_back((client, bytes));
                self.lending_acts(effects)
            }
            Err(error) => {
                let why = error.to_string();
                vec![Action::Answer(client, CellResponse::Refused { why })]
            }
        }
    }

    /// The reason why there can be no loan between this cell and another one, whatever its amount.
    fn check_loan(&self, other: u16, bytes: u64) -> Result<(), LoanError> {
        let me = self.me.number;
        if self.early.is_some() {
            return Err(LoanError::Starting(me));
        }
        if bytes == 0 {
            return Err(LoanError::Nothing);
        }
        if other == me {
            return Err(LoanError::OneCell(me));
        }
        let Some(known) = self.cells().find(|cell| cell.number == other) else {
            let known: Vec<String> = self.cells().map(|cell| cell.number.to_string()).collect();
            let known = known.join(", ");
            return Err(LoanError::NoCell { other, known });
        };
        if known.plan.host != self.plan.host {
            return Err(LoanError::OtherHost { me, other });
        }
        Ok(())
    }

    fn why(&self, refusal: Refusal, other: u16) -> LoanError {
        match refusal {
            Refusal::NotMet => LoanError::NotMet(other),
            Refusal::Short(free) => LoanError::Short {
                me: self.me.number,
                free_mib: free >> 20,
            },
        }
    }

    /// Translates the ledger's effects for clients and cells.
    pub(super) fn lending_acts(&mut self, effects: Vec<Effect>) -> Vec<Action> {
        let mut acts = Vec::new();
        for effect in effects {
            match effect {
                Effect::Keep(lent) => {
                    acts.push(Action::PersistLent(lent));
                    acts.extend(self.persist_requested());
                    let (_, effects) = self.publish().unwrap_or_default();
                    acts.extend(self.acts(effects));
                }
                Effect::Send(to, message) => acts.extend(self.say(to, CellPayload::Grant(message))),
                Effect::Taken(by) | Effect::Back(by) => {
                    acts.extend(self.answer_lender(by, |_, _| CellResponse::Done));
                }
                Effect::Kept(by) => acts.extend(self.answer_lender(by, |state, bytes| {
                    let why = state.why_kept(by, bytes);
                    CellResponse::Refused { why }
                })),
                Effect::Requested(by, bytes) => acts.extend(self.requested(by, bytes)),
                Effect::Lent(home, _) => acts.extend(self.has_replied(home, true)),
                Effect::Declined(home, _) => acts.extend(self.has_replied(home, false)),
                Effect::Returned(holder, bytes) => acts.extend(self.has_returned(holder, bytes)),
            }
        }
        acts
    }

    fn answer_lender(&mut self, by: u16, answer: impl FnOnce(&Self, u64) -> CellResponse) -> Option<Action> {
        let (client, bytes) = self.loans.0.get_mut(&by)?.pop_front()?;
        Some(Action::Answer(client, answer(self, bytes)))
    }

    fn why_kept(&self, by: u16, bytes: u64) -> String {
        let me = self.me.number;
        let mut names = Vec::new();
        let mut used = 0;
        for vm in self.vms().filter(|vm| vm.cell == by) {
            for part in vm.borrowed.iter().filter(|part| part.cell == me) {
                names.push(vm.name);
                used += part.bytes;
            }
        }
        let regions = self.regions_with_memory_of(by, me);
        let help = regions.first().map_or_else(
            || "end that, or reclaim less".to_owned(),
            |(region, _)| {
                format!(
                    "end that, move the region by `mirrorball move --region {region} --cell {by}`, or \
                     reclaim less"
                )
            },
        );
        for (region, bytes) in regions {
            names.push(region);
            used += bytes;
        }
        let names = match names[..] {
            [] => "a VM that is starting".to_owned(),
            _ => names.join(", "),
        };
        let lent = self.ledger.given().get(&by).copied().unwrap_or(0);
        format!(
            "cell {by} cannot give {} MiB back: of cell {me}'s memory it has {} MiB, of which {names} uses \
             {} MiB; {help}",
            bytes >> 20,
            lent >> 20,
            used >> 20
        )
    }

    /// Answers clients that wait for a cell that has died. The result of its request is open: the cell keeps
    /// its memory, and its next incarnation may report all of it.
    pub(super) fn lender_waits_in_vain(&mut self, dead: CellId) -> Vec<Action> {
        let waiting = self.loans.0.remove(&dead.number).unwrap_or_default();
        let refused = |(client, _)| {
            let why = format!(
                "cell {} died before it answered; `mirrorball cluster status` shows what it has when it runs \
                 again",
                dead.number
            );
            Action::Answer(client, CellResponse::Refused { why })
        };
        waiting.into_iter().map(refused).collect()
    }

    /// The cells whose answer a client waits for that lends or reclaims, or whose VM needs memory.
    pub(super) fn lender_waits_for(&self, client: Client) -> impl Iterator<Item = CellId> {
        let waiting = self.loans.0.iter().filter(move |(_, waiting)| {
            let mut waiting = waiting.iter();
            waiting.any(|(waits, _)| *waits == client)
        });
        let numbers = waiting.map(|(number, _)| *number);
        numbers.chain(self.asked_for(client)).filter_map(|number| {
            let life = self.life(number)?;
            Some(CellId { number, life })
        })
    }

    /// A VM's place in this cell, with the nodes of the cells that lend it memory.
    pub(super) fn place(&self, name: &str) -> VmPlacement {
        let mut borrowed = self.ledger.parts(name).cloned().unwrap_or_default();
        borrowed.remove(&self.me.number);
        let mut plan = self.plan.clone();
        let lenders = self.cells().filter(|cell| borrowed.contains_key(&cell.number));
        plan.nodes
            .extend(lenders.flat_map(|lender| lender.plan.nodes.iter().copied()));
        plan.nodes.sort_unstable();
        plan.nodes.dedup();
        VmPlacement {
            plan,
            borrowed: list(&borrowed),
        }
    }

    /// Takes over a VM to which the last process gave its place here.
    pub(super) fn inherit(&mut self, name: &str) {
        let own = self.vms().find(|vm| vm.cell == self.me.number && vm.name == name);
        if let Some(parts) = own.map(|vm| parts(vm.cell, vm.share, vm.borrowed)) {
            self.ledger.find(name.to_owned(), parts);
        }
    }

    /// The memory that a cell has for VMs: its own and what living ones have lent it, without that of its
    /// shared regions.
    pub(super) fn memory_of(&self, cell: &KnownCell<'_>) -> u64 {
        let lent: u64 = cell.lent.values().sum();
        let lenders = self.cells().filter(|lender| self.life(lender.number).is_some());
        let borrowed: u64 = lenders.filter_map(|lender| lender.lent.get(&cell.number)).sum();
        let regions = cell.regions.iter().map(|region| region.bytes);
        let used = regions.fold(lent, u64::saturating_add);
        cell.plan
            .memory_bytes
            .saturating_add(borrowed)
            .saturating_sub(used)
    }

    /// Memory that a cell holds of living lenders outside a list and that none of its VMs uses, as the table
    /// shows it.
    pub(super) fn unused_of_others(&self, holder: u16, list: &[u16]) -> u64 {
        let lenders = self.cells().filter(|lender| {
            let is_outside = lender.number != holder && !list.contains(&lender.number);
            is_outside && self.life(lender.number).is_some()
        });
        let unused = lenders.map(|lender| {
            let lent = lender.lent.get(&holder).copied().unwrap_or(0);
            let used = self.parts_of(holder).filter(|part| part.cell == lender.number);
            used.map(|part| part.bytes).fold(lent, u64::saturating_sub)
        });
        unused.fold(0, u64::saturating_add)
    }

    /// The memory that a cell has borrowed, by lender.
    pub(super) fn borrowed_by(&self, borrower: u16) -> Vec<LentMemory> {
        let of = |lender: KnownCell<'_>| {
            let bytes = *lender.lent.get(&borrower)?;
            Some(LentMemory {
                cell: lender.number,
                bytes,
            })
        };
        self.cells().filter_map(of).collect()
    }
}
