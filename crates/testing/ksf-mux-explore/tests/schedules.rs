//! The rules of the multiplexor's threads, in sampled schedules.

use ksf_mux_explore::combining;
use ksf_mux_explore::event_loops;
use ksf_mux_explore::explore;
use ksf_mux_explore::queue::{Scenario, Stop};
use ksf_mux_explore::sending::{End, accounts_for_every_message};

const PLAIN: Scenario = Scenario::PLAIN;

#[test]
fn every_request_for_work_is_followed_by_work() {
    explore(30_000, || combining::requests_are_followed_by_work(2, 0));
    explore(30_000, || combining::requests_are_followed_by_work(2, 1));
    explore(20_000, || combining::requests_are_followed_by_work(3, 2));
}

#[test]
fn messages_of_one_burst_are_worked_on_by_all_workers_at_once() {
    explore(15_000, || Scenario { bursts: &[&[3]], together: 3, ..PLAIN }.play());
}

#[test]
fn messages_of_several_connections_are_worked_on_by_all_workers_at_once() {
    explore(15_000, || Scenario { bursts: &[&[1], &[1, 1]], together: 3, ..PLAIN }.play());
    explore(10_000, || Scenario { bursts: &[&[2], &[1]], together: 3, ..PLAIN }.play());
    explore(5_000, || Scenario { workers: 4, bursts: &[&[1], &[1], &[1], &[1]], together: 4, ..PLAIN }.play());
}

#[test]
fn a_visit_does_not_wait_for_the_message_before_it() {
    explore(15_000, || Scenario { bursts: &[&[3]], read_messages: 1, together: 3, ..PLAIN }.play());
    explore(10_000, || Scenario { bursts: &[&[2], &[1]], read_messages: 1, together: 3, ..PLAIN }.play());
}

#[test]
fn batches_are_taken_once_and_only_while_all_are_busy() {
    explore(10_000, || Scenario { want: 3, bursts: &[&[3, 2], &[4]], ..PLAIN }.play());
    explore(10_000, || Scenario { workers: 2, want: 2, bursts: &[&[4], &[1, 2]], read_messages: 2, ..PLAIN }.play());
}

#[test]
fn batches_are_worked_on_once() {
    explore(10_000, || Scenario { batch_len: 2, bursts: &[&[3, 2], &[4]], ..PLAIN }.play());
    explore(10_000, || Scenario { batch_len: 3, want: 2, bursts: &[&[4, 3], &[3]], read_messages: 4, ..PLAIN }.play());
    explore(10_000, || Scenario { batch_len: 3, bursts: &[&[4], &[2, 3]], in_place: true, ..PLAIN }.play());
    explore(5_000, || Scenario { batch_len: 2, want: 2, bursts: &[&[5], &[3]], in_place: true, ..PLAIN }.play());
}

#[test]
fn batches_of_several_connections_are_worked_on_by_all_workers_at_once() {
    // A batch goes to one worker as a whole, the others are woken for the other batches.
    explore(10_000, || {
        Scenario { batch_len: 1, in_place: true, bursts: &[&[3]], together: 3, ..PLAIN }.play();
    });
    explore(10_000, || {
        Scenario { batch_len: 2, in_place: true, bursts: &[&[2], &[2], &[2]], together: 3, timer: true, ..PLAIN }
            .play();
    });
}

#[test]
fn what_a_worker_that_is_held_up_has_goes_to_others() {
    // The first message of a run is not done before the ones behind it are begun.
    for in_place in [false, true] {
        explore(10_000, move || {
            Scenario { in_place, batch_len: 3, bursts: &[&[3]], together: 3, timer: true, ..PLAIN }.play();
        });
        explore(10_000, move || {
            Scenario { in_place, batch_len: 2, want: 2, bursts: &[&[4], &[1]], together: 3, timer: true, ..PLAIN }
                .play();
        });
        explore(10_000, move || {
            Scenario { in_place, batch_len: 3, want: 3, bursts: &[&[3, 3], &[4]], timer: true, ..PLAIN }.play();
        });
    }
    explore(10_000, || {
        let stop = Some(Stop::Disable);
        Scenario { batch_len: 3, bursts: &[&[4], &[3]], together: 2, timer: true, stop, ..PLAIN }.play();
    });
}

#[test]
fn a_grant_is_closed_at_a_message_that_both_agree_on() {
    for grant in [2, 3, 8] {
        let granted = Scenario { in_place: true, grant, batch_len: 3, timer: true, ..PLAIN };
        // All of a run at once, by three workers, only after the grant of the first and the second were closed.
        explore(10_000, move || Scenario { bursts: &[&[3]], together: 3, ..granted }.play());
        explore(10_000, move || Scenario { bursts: &[&[3], &[2]], workers: 2, want: 2, ..granted }.play());
        explore(10_000, move || Scenario { bursts: &[&[3, 3], &[4]], want: 3, ..granted }.play());
    }
}

#[test]
fn answers_of_a_worker_that_is_held_up_leave() {
    let scenario = Scenario { in_place: true, one_by_one: true, timer: true, ..PLAIN };
    explore(10_000, move || Scenario { workers: 1, batch_len: 2, bursts: &[&[2]], ..scenario }.play());
    explore(10_000, move || Scenario { workers: 2, batch_len: 3, bursts: &[&[3]], ..scenario }.play());
    explore(10_000, move || Scenario { workers: 2, batch_len: 2, bursts: &[&[2], &[2]], ..scenario }.play());
}

#[test]
fn messages_of_a_peer_that_does_not_read_wait_and_are_worked_on_when_it_has() {
    for in_place in [false, true] {
        let slow = Scenario { in_place, unread_max: Some(1), batch_len: 2, want: 2, workers: 2, ..PLAIN };
        explore(10_000, move || Scenario { bursts: &[&[3], &[2]], ..slow }.play());
        explore(10_000, move || Scenario { bursts: &[&[4, 2]], unread_max: Some(2), grant: 2, ..slow }.play());
        explore(5_000, move || Scenario { bursts: &[&[3], &[3]], timer: true, grant: 2, ..slow }.play());
    }
    let ordered = Scenario { ordered: true, unread_max: Some(1), want: 3, ..PLAIN };
    explore(10_000, move || Scenario { bursts: &[&[3], &[2]], ..ordered }.play());
    let stop = Some(Stop::Leave);
    explore(5_000, move || {
        Scenario { bursts: &[&[3]], unread_max: Some(1), want: 2, workers: 2, stop, ..PLAIN }.play()
    });
}

#[test]
fn messages_that_a_reservation_holds_up_are_worked_on_when_it_ends() {
    let long = Scenario { in_place: true, reserves: true, unread_max: Some(1), workers: 2, ..PLAIN };
    explore(10_000, move || Scenario { bursts: &[&[3]], ..long }.play());
    explore(5_000, move || Scenario { bursts: &[&[3], &[2]], batch_len: 2, want: 2, grant: 2, ..long }.play());
}

#[test]
fn messages_behind_a_turn_are_worked_on_in_the_next_one() {
    for in_place in [false, true] {
        let turns = Scenario { in_place, turn: Some(1), workers: 2, ..PLAIN };
        explore(10_000, move || Scenario { bursts: &[&[4], &[1, 2]], ..turns }.play());
        explore(10_000, move || Scenario { bursts: &[&[3, 2], &[3]], turn: Some(2), workers: 3, ..turns }.play());
        explore(5_000, move || Scenario { bursts: &[&[4], &[2]], batch_len: 2, want: 2, timer: true, ..turns }.play());
        explore(10_000, move || Scenario { bursts: &[&[3], &[2]], unread_max: Some(1), ..turns }.play());
    }
    // A turn ends for no worker that could work on more.
    explore(10_000, || Scenario { bursts: &[&[5]], turn: Some(1), together: 3, ..PLAIN }.play());
    let ordered = Scenario { ordered: true, turn: Some(1), ..PLAIN };
    explore(10_000, move || Scenario { bursts: &[&[3], &[2]], want: 3, ..ordered }.play());
    let (caps, stop) = (&[1][..], Some(Stop::Disable));
    explore(5_000, move || Scenario { bursts: &[&[4], &[2]], turn: Some(1), caps, stop, ..PLAIN }.play());
}

#[test]
fn ordered_queues_keep_their_order() {
    explore(10_000, || Scenario { ordered: true, bursts: &[&[2, 2], &[3]], ..PLAIN }.play());
    explore(10_000, || Scenario { ordered: true, want: 3, bursts: &[&[2, 3], &[1]], dropped: true, ..PLAIN }.play());
    explore(10_000, || Scenario { ordered: true, want: 3, bursts: &[&[4], &[1, 1]], gives_back: true, ..PLAIN }.play());
}

#[test]
fn ordered_queues_are_worked_on_beside_each_other() {
    explore(10_000, || Scenario { ordered: true, bursts: &[&[2], &[2], &[1]], together: 3, ..PLAIN }.play());
}

#[test]
fn classes_stay_within_their_caps_and_leave_nothing_parked() {
    explore(10_000, || Scenario { caps: &[1], bursts: &[&[4], &[2, 2]], ..PLAIN }.play());
    explore(10_000, || Scenario { caps: &[2, 1], want: 2, bursts: &[&[3, 3]], dropped: true, ..PLAIN }.play());
    explore(10_000, || Scenario { caps: &[1], ordered: true, want: 2, bursts: &[&[3], &[2]], ..PLAIN }.play());
    explore(5_000, || Scenario { caps: &[1], want: 3, bursts: &[&[5]], gives_back: true, ..PLAIN }.play());
}

#[test]
fn uncapped_messages_pass_those_that_are_parked() {
    // Messages 1 and 3 are free; 0 holds the only place of the class until both are begun.
    explore(10_000, || Scenario { caps: &[1], bursts: &[&[4]], together: 3, ..PLAIN }.play());
}

#[test]
fn what_a_stopped_worker_had_goes_to_others() {
    explore(15_000, || {
        Scenario { bursts: &[&[1], &[1]], together: 2, stop: Some(Stop::Disable), ..PLAIN }.play();
    });
    explore(10_000, || Scenario { want: 3, bursts: &[&[3], &[2]], stop: Some(Stop::Disable), ..PLAIN }.play());
    explore(10_000, || Scenario { want: 3, bursts: &[&[3], &[2]], stop: Some(Stop::Leave), ..PLAIN }.play());
    explore(10_000, || {
        Scenario { want: 3, ordered: true, bursts: &[&[3], &[2]], stop: Some(Stop::Leave), ..PLAIN }.play();
    });
}

#[test]
fn what_is_pushed_is_sent_in_order_and_nothing_stays_behind() {
    explore(15_000, || accounts_for_every_message(End::Drained, 3, false));
    explore(5_000, || accounts_for_every_message(End::Drained, 16, false));
}

#[test]
fn what_is_not_sent_is_returned_or_refused() {
    explore(10_000, || accounts_for_every_message(End::Failed, 3, false));
    explore(5_000, || accounts_for_every_message(End::Failed, 5, true));
    explore(10_000, || accounts_for_every_message(End::Stopped, 3, false));
}

#[test]
fn a_failure_is_told_once() {
    explore(10_000, || accounts_for_every_message(End::Broken(5), 3, false));
    explore(5_000, || accounts_for_every_message(End::Broken(0), 3, true));
}

const LOOPS: event_loops::LoopScenario = event_loops::LoopScenario::PLAIN;

#[test]
fn one_event_loop_is_told_of_a_message() {
    for edge in [false, true] {
        explore(3_000, move || {
            event_loops::LoopScenario { edge, one_by_one: true, timer: false, ..LOOPS }.play();
        });
    }
}

#[test]
fn messages_that_come_together_go_to_all_event_loops() {
    for edge in [false, true] {
        explore(3_000, move || event_loops::LoopScenario { edge, together: 3, timer: false, ..LOOPS }.play());
        explore(3_000, move || event_loops::LoopScenario { edge, together: 3, ..LOOPS }.play());
        explore(2_000, move || event_loops::LoopScenario { edge, messages: 6, together: 3, ..LOOPS }.play());
    }
}

#[test]
fn event_loops_that_do_not_come_hold_nothing_up() {
    use event_loops::LoopProgram::{Drains, Leaves, NeverComes, TakesOne};
    for edge in [false, true] {
        explore(3_000, move || {
            event_loops::LoopScenario { edge, programs: &[NeverComes, Drains, NeverComes], ..LOOPS }.play();
        });
        explore(3_000, move || {
            let programs = &[Drains, NeverComes, Drains];
            event_loops::LoopScenario { edge, programs, messages: 2, together: 2, ..LOOPS }.play();
        });
        explore(3_000, move || {
            let programs = &[Leaves, Drains, NeverComes, Leaves];
            event_loops::LoopScenario { edge, programs, messages: 4, ..LOOPS }.play();
        });
    }
    explore(3_000, || event_loops::LoopScenario { programs: &[TakesOne; 2], messages: 3, together: 2, ..LOOPS }.play());
    explore(3_000, || {
        let programs = &[TakesOne, NeverComes, Drains];
        event_loops::LoopScenario { programs, messages: 4, ..LOOPS }.play();
    });
}
