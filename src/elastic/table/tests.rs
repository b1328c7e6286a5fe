#![allow(clippy::single_range_in_vec_init, reason = "lists of one range are compared")]

use super::super::KvLayout;
use super::*;

/// Ten blocks on five pages, in one plane.
fn table() -> Table {
    Table::new(Shape::new(KvLayout::ByPlane, &[2048], 10).unwrap().with_pages(4096))
}

fn request(blocks: Range<u64>) -> Request {
    Request { after: blocks.clone(), blocks, ahead: None }
}

fn commit(table: &mut Table, blocks: Range<u64>) {
    let plan = table.begin(&request(blocks));
    assert!(!table.finish(plan, &Committed::default(), Fence::default()));
}

/// Pages that are committed, committing and pending unmaps.
fn tally(table: &Table) -> [u64; 3] {
    [table.committed, table.transit.committing(), table.transit.pending_unmaps()]
}

fn run(first: u64, end: u64) -> Run {
    Run { range: 0, first, end }
}

#[test]
fn a_commit_takes_absent_pages_and_comes_whole_or_not_at_all() {
    let mut table = table();
    let plan = table.begin(&request(3..5));
    assert_eq!(plan.absent(), [run(1, 3)]);
    assert!(table.is_moving(&(0..10)) && !table.is_moving(&(0..2)) && !table.is_moving(&(6..10)));
    // Not coming, but on a page that is moved.
    assert!(table.is_moving(&(2..3)) && !table.is_coming(&(2..3)));
    table.abort(plan, |_| false);
    assert_eq!((tally(&table), table.mapped(), table.backed()), ([0; 3], (0, vec![]), vec![]));
    commit(&mut table, 3..5);
    let plan = table.begin(&request(0..10));
    assert_eq!((plan.absent(), plan.shared.len()), ([run(0, 1), run(3, 5)].as_slice(), 2));
    assert_eq!(table.backed(), [3..5]);
    table.finish(plan, &Committed::default(), Fence::default());
    assert_eq!(tally(&table), [5, 0, 0]);
    assert_eq!((table.backed(), table.mapped()), (vec![0..10], (5, vec![run(0, 5)])));
    let counts = table.counts;
    assert_eq!((counts.commits, counts.refused, counts.most_committed), (2, 1, 5));
}

#[test]
fn a_page_goes_with_its_last_block_and_stays_if_the_driver_refuses() {
    let mut table = table();
    commit(&mut table, 0..8);
    assert_eq!(
        (table.release(&(1..3), &Fence::default()), table.release(&(0..1), &Fence::default())),
        (0, 1)
    );
    assert_eq!(table.release(&(3..8), &Fence::default()), 3);
    assert_eq!((table.release(&(0..10), &Fence::default()), table.transit.pending_unmaps()), (0, 4));
    let plan = table.begin(&request(2..6));
    assert_eq!((plan.absent(), plan.revived_pages()), ([].as_slice(), 2));
    table.abort(plan, |_| false);
    assert_eq!(tally(&table), [0, 0, 4]);
    commit(&mut table, 2..6);
    assert_eq!(tally(&table), [2, 0, 2]);
    // The undo of this commit failed.
    let plan = table.begin(&request(8..10));
    table.abort(plan, |place| place == (0, 4));
    assert_eq!(tally(&table), [2, 0, 3]);
    assert_eq!((table.counts.mapped, table.mapped()), (1, (2, vec![run(0, 5)])));
}

#[test]
fn a_page_of_a_coming_block_stays_while_its_neighbour_is_released() {
    for succeeds in [true, false] {
        let mut table = table();
        commit(&mut table, 0..1);
        let plan = table.begin(&request(1..2));
        assert_eq!((plan.absent(), table.release(&(0..1), &Fence::default())), ([].as_slice(), 0));
        if succeeds {
            table.finish(plan, &Committed::default(), Fence::default());
            assert_eq!((table.backed(), table.committed), (vec![1..2], 1));
        } else {
            table.abort(plan, |_| false);
            assert_eq!((table.backed(), table.committed, table.transit.pending_unmaps()), (vec![], 0, 1));
        }
    }
}
