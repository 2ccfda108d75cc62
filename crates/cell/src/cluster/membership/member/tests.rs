//! Entries that end, and entries that etcd has lost.

use super::*;

const ME: CellId = CellId { number: 0, life: 3 };
const OTHER: CellId = CellId { number: 1, life: 5 };
const POLL_INTERVAL_MIN: Duration = Duration::from_millis(100);

/// The records of two cells that live.
fn good() -> Records {
    let both = Members::from([(0, 3), (1, 5)]);
    Records {
        members: both.clone(),
        lives: both,
        removed: Members::new(),
        revision: 7,
    }
}

fn lost() -> Records {
    Records {
        revision: 9,
        ..Records::default()
    }
}

/// A member that has seen [`good`].
fn member() -> Member<u8> {
    let mut member = Member::new(ME, 1, &good().members);
    assert_eq!(round(&mut member, &good()), []);
    member
}

/// A round in which the lease lives and these are the records, until something is to be written back or the
/// round is over.
fn round(member: &mut Member<u8>, records: &Records) -> Vec<MembershipEvent> {
    member.begin_round(POLL_INTERVAL_MIN);
    let mut news = Vec::new();
    for _ in 0..10 {
        let answer = match member.request() {
            Some(EtcdRequest::Records) => EtcdAnswer::Records(records.clone()),
            Some(EtcdRequest::Keep(_)) => EtcdAnswer::Kept(true),
            Some(EtcdRequest::Remove { .. }) => EtcdAnswer::Done,
            _ => break,
        };
        news.extend(member.answered(Some(answer)));
    }
    news
}

fn restore() -> Option<EtcdRequest<u8>> {
    Some(EtcdRequest::Restore {
        me: ME,
        lease: 1,
        lives: good().lives,
        revision: 9,
    })
}

#[test]
fn cell_writes_its_entry_back_when_all_are_lost_and_takes_no_other_for_dead() {
    let mut member = member();
    assert_eq!(round(&mut member, &lost()), []);
    assert_eq!(member.request(), restore());
    assert_eq!(member.answered(Some(EtcdAnswer::Entered(true))), []);
    let mine = Records {
        members: [(0, 3)].into(),
        lives: good().lives,
        revision: 10,
        ..Records::default()
    };
    let mut news = member.answered(Some(EtcdAnswer::Records(mine.clone())));
    // The other one may take a while.
    for _ in 0..40 {
        news.extend(round(&mut member, &mine));
    }
    assert_eq!(news, []);
    assert_eq!(round(&mut member, &good()), []);
    // All entries are there again: a missing cell is dead.
    for _ in 0..20 {
        assert_eq!(round(&mut member, &good()), []);
    }
    assert_eq!(round(&mut member, &mine), [MembershipEvent::Died(OTHER)]);
}

#[test]
fn one_that_does_not_write_its_entry_back_is_removed_before_it_is_over() {
    let mut member = member();
    round(&mut member, &lost());
    member.answered(Some(EtcdAnswer::Entered(true)));
    let mut mine = Records {
        members: [(0, 3)].into(),
        lives: good().lives,
        revision: 10,
        ..Records::default()
    };
    member.answered(Some(EtcdAnswer::Records(mine.clone())));
    member.begin_round(GRACE);
    let removal = EtcdRequest::Remove {
        cell: OTHER,
        accuser: ME,
    };
    while member.request() != Some(removal.clone()) {
        assert!(member.request().is_some());
        member.answered(None);
    }
    assert_eq!(member.answered(Some(EtcdAnswer::Done)), []);
    mine.removed.insert(OTHER.number, OTHER.life);
    assert_eq!(
        member.answered(Some(EtcdAnswer::Records(mine))),
        [MembershipEvent::Died(OTHER)]
    );
}

#[test]
fn an_entry_that_another_cell_has_removed_is_not_written_back() {
    let mut member = member();
    let removed = Records {
        removed: [(0, 3)].into(),
        ..lost()
    };
    assert_eq!(round(&mut member, &removed), [MembershipEvent::Evicted]);
}

#[test]
fn an_entry_whose_lease_has_ended_is_not_written_back() {
    let mut member = member();
    member.begin_round(POLL_INTERVAL_MIN);
    assert_eq!(member.answered(Some(EtcdAnswer::Records(lost()))), []);
    assert_eq!(member.request(), Some(EtcdRequest::Keep(1)));
    assert_eq!(member.answered(Some(EtcdAnswer::Kept(false))), []);
    assert_eq!(
        member.answered(Some(EtcdAnswer::Records(lost()))),
        [MembershipEvent::Evicted]
    );
}

#[test]
fn a_cell_without_its_links_writes_nothing_back() {
    let mut member = member();
    member.suspect(OTHER);
    assert_eq!(round(&mut member, &lost()), [MembershipEvent::Evicted]);
    // Nor when etcd has just answered the removal.
    let mut member = self::member();
    member.suspect(OTHER);
    member.begin_round(POLL_INTERVAL_MIN);
    assert_eq!(member.answered(Some(EtcdAnswer::Done)), []);
    assert_eq!(
        member.answered(Some(EtcdAnswer::Records(lost()))),
        [MembershipEvent::Evicted]
    );
}

#[test]
fn a_life_that_may_be_given_out_again_is_not_written_back() {
    // A later incarnation has entered.
    let mut member = member();
    let later = Records {
        lives: [(0, 4)].into(),
        ..lost()
    };
    assert_eq!(round(&mut member, &later), [MembershipEvent::Evicted]);
    // A cell that is unknown here has entered the empty etcd, and takes itself for the only one.
    for stranger in [(2, 1), (1, 6), (0, 4)] {
        let mut member = self::member();
        let entered = Records {
            members: [stranger].into(),
            ..lost()
        };
        assert_eq!(
            round(&mut member, &entered),
            [MembershipEvent::Evicted],
            "{stranger:?}"
        );
    }
}

#[test]
fn another_cell_that_was_quicker_is_looked_at_before_the_next_attempt() {
    let mut member = member();
    round(&mut member, &lost());
    assert_eq!(member.answered(Some(EtcdAnswer::Entered(false))), []);
    assert_eq!(member.request(), Some(EtcdRequest::Records));
    let others = Records {
        members: [(1, 5)].into(),
        lives: good().lives,
        revision: 10,
        ..Records::default()
    };
    assert_eq!(member.answered(Some(EtcdAnswer::Records(others))), []);
    assert_eq!(
        member.request(),
        Some(EtcdRequest::Restore {
            me: ME,
            lease: 1,
            lives: good().lives,
            revision: 10
        })
    );
}

#[test]
fn dead_incarnation_that_comes_back_is_accused() {
    let mut member = member();
    let alone = Records {
        members: [(0, 3)].into(),
        ..good()
    };
    assert_eq!(round(&mut member, &alone), [MembershipEvent::Died(OTHER)]);
    assert_eq!(round(&mut member, &good()), []);
    member.begin_round(POLL_INTERVAL_MIN);
    let removal = EtcdRequest::Remove {
        cell: OTHER,
        accuser: ME,
    };
    assert_eq!(member.request(), Some(removal));
}

#[test]
fn host_with_a_record_of_an_incarnation_gives_it_out_to_no_other_cell() {
    let mut joining = Joining::new(0, 3);
    joining.answered(Some(EtcdAnswer::LastLife(None)));
    joining.answered(Some(EtcdAnswer::Lease(1_u8)));
    let enter = |joining: &Joining<u8>, life| {
        let me = CellId { number: 0, life };
        assert!(matches!(joining.request(), EtcdRequest::Enter { me: entered, .. } if entered == me));
    };
    enter(&joining, 4);
    joining.answered(Some(EtcdAnswer::Entered(true)));
    // Its entry has been lost already: it may have been seen.
    joining.answered(Some(EtcdAnswer::Records(lost())));
    joining.answered(Some(EtcdAnswer::LastLife(None)));
    joining.answered(Some(EtcdAnswer::Lease(2)));
    enter(&joining, 5);
}

/// The records without the other cell, after its incarnations up to `life`.
fn without_other(life: u32) -> Records {
    let mut records = good();
    records.members.remove(&OTHER.number);
    records.lives.insert(OTHER.number, life);
    records
}

#[test]
fn absent_cell_lapses_once_when_the_time_is_over_and_not_before() {
    let mut member = member().with_lapse(Some(10 * POLL_INTERVAL_MIN));
    assert_eq!(
        round(&mut member, &without_other(5)),
        [MembershipEvent::Died(OTHER)]
    );
    // The round of the first list does not count, since the list may be of its end.
    for _ in 0..10 {
        assert_eq!(round(&mut member, &without_other(5)), []);
    }
    assert_eq!(
        round(&mut member, &without_other(5)),
        [MembershipEvent::Lapsed(OTHER.number)]
    );
    for _ in 0..20 {
        assert_eq!(round(&mut member, &without_other(5)), []);
    }
}

#[test]
fn cell_that_was_a_member_between_two_lists_lapses_from_then_on() {
    let mut member = member().with_lapse(Some(10 * POLL_INTERVAL_MIN));
    round(&mut member, &without_other(5));
    for life in [5, 6] {
        for _ in 0..9 {
            assert_eq!(round(&mut member, &without_other(life)), []);
        }
    }
    round(&mut member, &without_other(6));
    round(&mut member, &without_other(6));
    assert_eq!(
        round(&mut member, &without_other(6)),
        [MembershipEvent::Lapsed(OTHER.number)]
    );
    // It comes back and goes again.
    let mut back = good();
    back.members.insert(OTHER.number, 7);
    back.lives.insert(OTHER.number, 7);
    round(&mut member, &back);
    for _ in 0..11 {
        assert!(!round(&mut member, &without_other(7)).contains(&MembershipEvent::Lapsed(OTHER.number)));
    }
    assert_eq!(
        round(&mut member, &without_other(7)),
        [MembershipEvent::Lapsed(OTHER.number)]
    );
}

#[test]
fn no_cell_lapses_while_etcd_does_not_answer_or_has_lost_its_keys_or_where_vms_run_on() {
    let mut keeps = member();
    let mut member = member().with_lapse(Some(10 * POLL_INTERVAL_MIN));
    for _ in 0..30 {
        member.begin_round(POLL_INTERVAL_MIN);
        while member.request().is_some() {
            assert_eq!(member.answered(None), []);
        }
    }
    assert_eq!(round(&mut member, &lost()), []);
    assert_eq!(member.answered(Some(EtcdAnswer::Entered(true))), []);
    let mut mine = without_other(5);
    mine.lives.clear();
    // Etcd has lost the entry of a cell that lives: it has a while to write it back.
    for _ in 0..20 {
        assert_eq!(round(&mut member, &mine), []);
    }
    for _ in 0..30 {
        assert!(!round(&mut keeps, &without_other(5)).contains(&MembershipEvent::Lapsed(OTHER.number)));
    }
}

#[test]
fn cell_whose_host_has_left_is_dead_for_all_and_gets_no_further_incarnation() {
    let mut member = member();
    let mut retired = good();
    retired.members.remove(&OTHER.number);
    for lives in [&mut retired.lives, &mut retired.removed] {
        lives.insert(OTHER.number, RETIRED);
    }
    assert_eq!(round(&mut member, &retired), [MembershipEvent::Died(OTHER)]);
    assert_eq!(round(&mut member, &retired), []);
    let mut joining = Joining::<u8>::new(OTHER.number, 5);
    for _ in 0..3 {
        let progress = joining.answered(Some(EtcdAnswer::LastLife(Some(RETIRED))));
        assert!(matches!(progress, Progress::Waits), "{progress:?}");
        assert_eq!(joining.request(), EtcdRequest::LastLife(OTHER.number));
    }
}
