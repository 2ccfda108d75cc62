mod calls;
mod ungated;

use super::super::message::Refusal;
use super::super::view::Terms;
use super::super::windows::WindowState;
use super::super::{MILLISECOND, VmId};
use super::*;

/// A machine in which nothing is published: each CPU is idle.
struct Quiet {
    vcpus: u16,
}

impl View for Quiet {
    fn word(&self, _: CpuId) -> Word {
        Word {
            beat_ms: beat_ms(NOW),
            ..Word::default()
        }
    }
    fn vcpu(&self, _: VcpuId) -> VcpuEntry {
        VcpuEntry::default()
    }
    fn queued(&self, _: CpuId, _: usize) -> Option<VcpuId> {
        None
    }
    fn load(&self, _: CpuId, _: usize) -> u32 {
        0
    }
    fn terms(&self, _: VmId) -> Terms {
        Terms {
            vcpus: self.vcpus,
            ..Terms::default()
        }
    }
    fn may_run(&self, _: VcpuId, _: CpuId) -> bool {
        true
    }
    fn depends_on(&self, _: VcpuId, _: u16) -> bool {
        false
    }
}

/// A machine whose CPU 2 has vCPU 0 of VM 1 and three others.
struct Loaded;

impl View for Loaded {
    fn word(&self, cpu: CpuId) -> Word {
        let load = if cpu == CpuId(2) { 4 } else { 0 };
        Word {
            load,
            ..Quiet { vcpus: 2 }.word(cpu)
        }
    }
    fn vcpu(&self, vcpu: VcpuId) -> VcpuEntry {
        let is_here = vcpu == self::vcpu(1, 0);
        VcpuEntry {
            cpu: CpuId(if is_here { 2 } else { 0 }),
            ..VcpuEntry::default()
        }
    }
    fn queued(&self, _: CpuId, _: usize) -> Option<VcpuId> {
        None
    }
    fn load(&self, _: CpuId, _: usize) -> u32 {
        0
    }
    fn terms(&self, _: VmId) -> Terms {
        Terms::default()
    }
    fn may_run(&self, _: VcpuId, _: CpuId) -> bool {
        true
    }
    fn depends_on(&self, _: VcpuId, _: u16) -> bool {
        false
    }
}

/// A quiet machine where VM 1 spans cells.
struct Spanned(WindowState);

impl View for Spanned {
    fn word(&self, cpu: CpuId) -> Word {
        Quiet { vcpus: 1 }.word(cpu)
    }
    fn vcpu(&self, _: VcpuId) -> VcpuEntry {
        VcpuEntry::default()
    }
    fn queued(&self, _: CpuId, _: usize) -> Option<VcpuId> {
        None
    }
    fn load(&self, _: CpuId, _: usize) -> u32 {
        0
    }
    fn terms(&self, vm: VmId) -> Terms {
        let is_spanning = vm == VmId(1);
        Terms {
            is_gang: !is_spanning,
            window: if is_spanning { self.0 } else { WindowState::Absent },
            ..Terms::default()
        }
    }
    fn may_run(&self, _: VcpuId, _: CpuId) -> bool {
        true
    }
    fn depends_on(&self, _: VcpuId, _: u16) -> bool {
        false
    }
}

const NOW: Nanos = 1_000 * MILLISECOND;

fn vcpu(vm: u16, index: u16) -> VcpuId {
    VcpuId { vm: VmId(vm), index }
}

fn driver() -> Driver {
    Driver::new(
        CpuId(0),
        Arc::new(Topology::regular(1, 1, 4)),
        Tunables::default(),
    )
}

fn handle(driver: &mut Driver, now: Nanos, event: Event) -> Vec<Effect> {
    let mut effects = Vec::new();
    driver.handle(now, event, &Quiet { vcpus: 2 }, &mut effects);
    effects
}

fn message(from: u16, message: Message) -> Event {
    let from = CpuId(from);
    Event::Message { from, message }
}

fn add(vm: u16, index: u16) -> Event {
    let (vcpu, is_awake) = (vcpu(vm, index), true);
    Event::Add { vcpu, is_awake }
}

#[test]
fn timer_that_comes_early_is_set_again() {
    let mut driver = driver();
    let effects = handle(&mut driver, NOW, Event::Timer);
    let timer = |effects: &[Effect]| {
        effects.iter().find_map(|effect| match effect {
            Effect::Timer(at) => Some(*at),
            _ => None,
        })
    };
    let at = timer(&effects).expect("a timer");
    let effects = handle(&mut driver, at - 1, Event::Timer);
    assert!(timer(&effects).is_some_and(|at| at <= NOW + 10 * MILLISECOND));
}

#[test]
fn vcpu_of_a_vm_that_is_here_or_awaited_is_refused() {
    let mut driver = driver();
    handle(&mut driver, NOW, add(1, 0));
    let suggest = |vm, index| {
        let (vcpu, owner, reason) = (vcpu(vm, index), CpuId(2), MoveReason::Evacuation);
        message(3, Message::Suggest { vcpu, owner, reason })
    };
    let refusal = |vcpu| Effect::Send {
        to: CpuId(3),
        message: Message::Refuse {
            vcpu,
            refusal: Refusal::SameVm,
        },
    };
    assert!(handle(&mut driver, NOW, suggest(1, 1)).contains(&refusal(vcpu(1, 1))));
    let (first, reason) = (vcpu(2, 0), MoveReason::Evacuation);
    let give = Effect::Send {
        to: CpuId(2),
        message: Message::Give { vcpu: first, reason },
    };
    assert!(handle(&mut driver, NOW, suggest(2, 0)).contains(&give));
    assert!(handle(&mut driver, NOW, suggest(2, 1)).contains(&refusal(vcpu(2, 1))));
    let refusal = Refusal::NotHere;
    handle(
        &mut driver,
        NOW,
        message(2, Message::Refuse { vcpu: first, refusal }),
    );
    let (vcpu, reason) = (vcpu(2, 1), MoveReason::Evacuation);
    let give = Effect::Send {
        to: CpuId(2),
        message: Message::Give { vcpu, reason },
    };
    assert!(handle(&mut driver, NOW, suggest(2, 1)).contains(&give));
}

#[test]
fn running_vcpu_is_given_to_an_order_only_and_its_cpu_stops_it_first() {
    let mut driver = driver();
    let effects = handle(&mut driver, NOW, add(1, 0));
    assert!(effects.contains(&Effect::Run(Some(vcpu(1, 0)))));
    let vcpu = vcpu(1, 0);
    let give = |reason| message(2, Message::Give { vcpu, reason });
    let effects = handle(&mut driver, NOW + 20 * MILLISECOND, give(MoveReason::Idle));
    let refusal = Refusal::Running;
    let message = Message::Refuse { vcpu, refusal };
    assert!(effects.contains(&Effect::Send {
        to: CpuId(2),
        message
    }));
    let effects = handle(&mut driver, NOW + 20 * MILLISECOND, give(MoveReason::Order));
    let is_take = |effect: &Effect| {
        matches!(
            effect,
            Effect::Send {
                message: Message::Take { .. },
                ..
            }
        )
    };
    assert!(effects.iter().any(is_take) && effects.contains(&Effect::Run(None)));
    assert!(driver.queue().is_empty());
}

#[test]
fn halt_takes_a_vcpu_off_after_the_hysteresis_and_a_wake_within_it_changes_nothing() {
    let mut driver = driver();
    handle(&mut driver, NOW, add(1, 0));
    let vcpu = vcpu(1, 0);
    let event = |change| Event::Vcpu { vcpu, change };
    handle(&mut driver, NOW + MILLISECOND, event(Change::Halt));
    let effects = handle(&mut driver, NOW + MILLISECOND + 100_000, event(Change::Wake));
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Run(_))));
    assert_eq!(driver.running(), Some((vcpu, Mode::Entitled)));
    handle(&mut driver, NOW + 2 * MILLISECOND, event(Change::Halt));
    let effects = handle(&mut driver, NOW + 2 * MILLISECOND + 200_000, Event::Timer);
    assert!(effects.contains(&Effect::Run(None)));
    assert_eq!(driver.queue()[0].entry.state, VcpuState::Idle);
}

#[test]
fn order_for_a_vcpu_that_a_balancer_awaits_is_answered_all_the_same() {
    let mut driver = driver();
    let vcpu = vcpu(1, 0);
    let give = |reason| Effect::Send {
        to: CpuId(2),
        message: Message::Give { vcpu, reason },
    };
    let (owner, reason) = (CpuId(2), MoveReason::Balance);
    let mut effects = Vec::new();
    driver.suggested(CpuId(3), vcpu, owner, reason, &Loaded, &mut effects);
    assert_eq!(effects, [give(MoveReason::Balance)]);
    effects.clear();
    driver.handle(NOW, Event::Order { vcpu }, &Loaded, &mut effects);
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Refused(..))));
    effects.clear();
    let refuse = |refusal| message(2, Message::Refuse { vcpu, refusal });
    driver.handle(NOW, refuse(Refusal::Running), &Loaded, &mut effects);
    assert!(effects.contains(&give(MoveReason::Order)), "{effects:?}");
    effects.clear();
    driver.handle(NOW, refuse(Refusal::NotHere), &Loaded, &mut effects);
    assert!(
        effects.contains(&Effect::Refused(vcpu, Refusal::NotHere)),
        "{effects:?}"
    );
}

#[test]
fn vm_that_spans_cells_runs_in_its_window_before_gangs_and_not_outside_of_it() {
    let mut driver = driver();
    let mut at = |ms: u64, window, event| {
        let now = NOW + ms * MILLISECOND;
        driver.handle(now, event, &Spanned(window), &mut Vec::new());
        (driver.running(), driver.virtual_clock)
    };
    use WindowState::{Closed, Open};
    let spanning = Some((vcpu(1, 0), Mode::Entitled));
    let local = Some((vcpu(2, 0), Mode::Entitled));
    assert_eq!(at(0, Closed, add(1, 0)).0, None, "its window is closed");
    assert_eq!(at(0, Closed, add(2, 0)).0, local);
    // A slice of the other VM that has not ended holds no window up.
    let (running, before) = at(5, Open, Event::Timer);
    assert_eq!(running, spanning);
    assert_eq!(at(35, Open, Event::Timer).0, spanning);
    assert_eq!(at(65, Open, Event::Timer).0, spanning);
    let halted = |change| Event::Vcpu {
        vcpu: vcpu(1, 0),
        change,
    };
    // A vCPU that has halted leaves its window to others.
    at(66, Open, halted(Change::Halt));
    assert_eq!(at(67, Open, Event::Timer).0, local);
    assert_eq!(at(68, Open, halted(Change::Wake)).0, spanning);
    let (running, after) = at(70, Closed, Event::Timer);
    assert_eq!(running, local);
    assert!(
        after < before + 30 * MILLISECOND,
        "windows are no part of the order"
    );
}
