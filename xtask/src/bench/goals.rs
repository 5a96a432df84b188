//! The goals of the rows, as ratios within one run.

use super::case::{Metric, Placement, STORE_MAIN, by_depth};
use super::contestant::Contestant::{
    Ab, Accel, AccelHaproxyShards, AccelOff, Demo, Diod, Epoll, Ganesha, GaneshaTuned, HttpNone, IdealQueue, Kernel,
    KernelWorkers4, Nfs, NginxExclusive, NginxReuseport, NginxTuned, Ninep, PreadSend, Redis, RedisAlways,
    RedisAlwaysThreads, RedisBenchmark, RedisThreads, Store, StoreBenchmark, StoreNone, StoreRoomy, Threads, UdpMmsg,
    UdpPlain, Uring, WorkLoops, Workers2, Workers4, Wrk,
};
use super::judge::{Against, Bound, Goal};

/// All of them.
pub(super) fn goals() -> Vec<Goal> {
    let mut goals = Vec::new();
    round_trip(&mut goals);
    pipelined(&mut goals);
    udp(&mut goals);
    idle(&mut goals);
    mux(&mut goals);
    connections(&mut goals);
    accel(&mut goals);
    store(&mut goals);
    nfs(&mut goals);
    ninep(&mut goals);
    goals
}

fn round_trip(goals: &mut Vec<Goal>) {
    for (case, subject, placement, ratio) in [
        ("null-tcp-1", Kernel, Placement::Same, 0.85),
        ("null-tcp-1", Kernel, Placement::Other, 0.55),
        ("null-tcp-1", Uring, Placement::Same, 1.05),
        ("null-tcp-1", Uring, Placement::Other, 0.5),
        ("null-tcp-1-polled", Uring, Placement::Other, 0.5),
    ] {
        goals.push(Goal {
            case,
            subject,
            placement,
            metric: Metric::RttP50Us,
            against: Against::Best(&[Threads]),
            bound: Bound::AtMost(ratio),
        });
    }
}

fn pipelined(goals: &mut Vec<Goal>) {
    for case in ["null-tcp-128", "null-tcp-128x2"] {
        for subject in [Kernel, Uring] {
            for (placement, ratio) in [(Placement::Same, 1.0), (Placement::Other, 1.5)] {
                let goal = |metric, against, bound| Goal { case, subject, placement, metric, against, bound };
                let threads = Against::Best(&[Threads]);
                goals.push(goal(Metric::MessagesPerS, threads, Bound::AtLeast(ratio)));
                goals.push(goal(Metric::TotalCpuUs, threads, Bound::AtMost(0.7)));
                goals.push(goal(Metric::MessagesPerS, Against::OwnMedian, Bound::AtLeast(0.8)));
            }
        }
    }
}

fn udp(goals: &mut Vec<Goal>) {
    let peers = Against::Best(&[UdpPlain, UdpMmsg]);
    for (case, metric, bounds) in [
        ("echo-udp-1", Metric::RttP50Us, [Bound::AtMost(0.3), Bound::AtMost(0.3)]),
        ("null-udp-1", Metric::RttP50Us, [Bound::AtMost(0.3), Bound::AtMost(0.3)]),
        ("echo-udp-128", Metric::MessagesPerS, [Bound::AtLeast(1.8), Bound::AtLeast(1.0)]),
        ("null-udp-128", Metric::MessagesPerS, [Bound::AtLeast(1.8), Bound::AtLeast(1.0)]),
    ] {
        for (placement, bound) in [Placement::Same, Placement::Other].into_iter().zip(bounds) {
            goals.push(Goal { case, subject: Kernel, placement, metric, against: peers, bound });
        }
    }
    for case in ["echo-udp-128", "null-udp-128"] {
        for subject in [Uring, Epoll] {
            for placement in [Placement::Same, Placement::Other] {
                let (metric, bound) = (Metric::MessagesPerS, Bound::AtLeast(1.0));
                goals.push(Goal { case, subject, placement, metric, against: peers, bound });
            }
        }
    }
}

fn idle(goals: &mut Vec<Goal>) {
    for subject in [Kernel, Uring] {
        // A thousandth of a CPU is what "no measurable time" means here.
        let bounds = [(Metric::IdleBytes, 1024.0), (Metric::IdleRttRatio, 1.2), (Metric::IdleCpuUsPerS, 1000.0)];
        for (metric, most) in bounds {
            goals.push(Goal {
                case: "idle-10000",
                subject,
                placement: Placement::Other,
                metric,
                against: Against::Absolute,
                bound: Bound::AtMost(most),
            });
        }
    }
}

fn mux(goals: &mut Vec<Goal>) {
    let placement = Placement::Shared;
    let mut goal = |case, subject, metric, against, bound| {
        goals.push(Goal { case, subject, placement, metric, against, bound });
    };
    let loops = Against::Best(&[WorkLoops]);
    goal("mux-discard", Workers2, Metric::MessagesPerS, loops, Bound::AtLeast(1.0));
    goal("mux-discard", Workers2, Metric::RttMeanUs, loops, Bound::AtMost(1.0));
    for case in ["mux-sleep-split", "mux-sleep-skewed", "mux-compute-split", "mux-compute-skewed"] {
        goal(case, Workers2, Metric::MessagesPerS, Against::SkewBound(WorkLoops), Bound::AtLeast(0.9));
    }
    for case in ["mux-pipeline-64", "mux-pipeline-256"] {
        goal(case, Workers2, Metric::MessagesPerS, loops, Bound::AtLeast(0.95));
    }
    goal("mux-mixed", Workers4, Metric::QuickP99Us, Against::Best(&[IdealQueue]), Bound::AtMost(1.1));
    // By shape: both on the same emulated machine.
    goals.push(Goal {
        case: "mux-mixed",
        subject: Workers4,
        placement: Placement::Vm,
        metric: Metric::QuickP99Us,
        against: Against::Best(&[KernelWorkers4]),
        bound: Bound::AtMost(0.3),
    });
}

fn connections(goals: &mut Vec<Goal>) {
    let nginx = Against::Best(&[NginxExclusive, NginxReuseport, NginxTuned]);
    for placement in [Placement::Same, Placement::Other, Placement::Unpinned] {
        for (metric, bound) in [
            (Metric::MessagesPerS, Bound::AtLeast(1.0)),
            (Metric::ServerCpuUs, Bound::AtMost(0.7)),
            (Metric::RttP99Us, Bound::AtMost(0.8)),
        ] {
            goals.push(Goal { case: "connections", subject: Demo, placement, metric, against: nginx, bound });
        }
    }
}

fn accel(goals: &mut Vec<Goal>) {
    let placement = Placement::Same;
    let mut goal = |case, subject, metric, against, bound| {
        goals.push(Goal { case, subject, placement, metric, against, bound });
    };
    let (plain, reuseport) = (Against::Best(&[NginxExclusive]), Against::Best(&[NginxReuseport]));
    for case in ["accel-rate", "accel-steady"] {
        goal(case, Accel, Metric::LocalShare, Against::WorstRun, Bound::AtLeast(1.0));
        goal(case, Accel, Metric::ServerCpuUs, reuseport, Bound::AtMost(1.0));
        goal(case, Accel, Metric::MachineCpuUs, reuseport, Bound::AtMost(1.0));
    }
    // Clients at a rate load both CPUs alike; in a closed loop the quicker one does more.
    goal("accel-steady", Accel, Metric::Balance, Against::WorstRun, Bound::AtMost(1.1));
    goal("accel-stall", Accel, Metric::RttP99Us, reuseport, Bound::AtMost(0.3));
    for case in ["accel-reload", "accel-resize", "accel-kill"] {
        goal(case, Accel, Metric::Failures, Against::WorstRun, Bound::AtMost(0.0));
    }
    for case in ["accel-rate", "accel-kept"] {
        goal(case, AccelOff, Metric::MessagesPerS, plain, Bound::AtLeast(0.99));
        goal(case, AccelOff, Metric::MachineCpuUs, plain, Bound::AtMost(1.01));
    }
    goal("accel-others", AccelHaproxyShards, Metric::LocalShare, Against::WorstRun, Bound::AtLeast(1.0));
    // Generators that share no code see the same server.
    for (case, peers) in [("generators", &[Wrk][..]), ("generators-new", &[Ab])] {
        for bound in [Bound::AtLeast(0.95), Bound::AtMost(1.05)] {
            goal(case, NginxExclusive, Metric::MessagesPerS, Against::Best(peers), bound);
        }
    }
}

fn store(goals: &mut Vec<Goal>) {
    let mut goal = |case, subject, placement, metric, against, bound| {
        goals.push(Goal { case, subject, placement, metric, against, bound });
    };
    let (always, memory) = (Against::Best(&[RedisAlways]), Against::Best(&[Redis]));
    // Threads for the sockets of Redis need a second CPU.
    let always_tuned = Against::Best(&[RedisAlways, RedisAlwaysThreads]);
    let memory_tuned = Against::Best(&[Redis, RedisThreads]);
    let (rate, cpu) = (Metric::MessagesPerS, Metric::ServerCpuUs);
    for (placement, always, memory) in
        [(Placement::Other, always, memory), (Placement::Unpinned, always_tuned, memory_tuned)]
    {
        // The second counts where the client is the limit, and the first cannot be met.
        goal(STORE_MAIN, Store, placement, rate, always, Bound::AtLeast(2.0));
        goal(STORE_MAIN, Store, placement, cpu, always, Bound::AtMost(0.4));
        goal(STORE_MAIN, Store, placement, Metric::RttP99Us, always, Bound::AtMost(0.5));
        goal(STORE_MAIN, Store, placement, rate, memory, Bound::AtLeast(1.0));
    }
    for case in ["store-set-1000", "store-set-1024-100", "store-set-1400"] {
        goal(case, Store, Placement::Other, rate, always, Bound::AtLeast(2.0));
        goal(case, Store, Placement::Other, cpu, always, Bound::AtMost(0.4));
    }
    for (case, against, least) in [
        ("store-set-50-16", always, 3.0),
        ("store-set-50-16", memory, 1.0),
        ("store-set-256-16", always, 3.0),
        ("store-set-256-16", memory, 1.0),
        ("store-set-1", always, 1.5),
        ("store-get-50", memory, 1.0),
        ("store-get-50-16", memory, 1.0),
        ("store-mixed-50", memory, 1.0),
    ] {
        goal(case, Store, Placement::Other, rate, against, Bound::AtLeast(least));
    }
    // Generators that share no code see the same server.
    let benchmark = Against::Best(&[RedisBenchmark]);
    for bound in [Bound::AtLeast(0.95), Bound::AtMost(1.05)] {
        goal("store-generators", RedisAlways, Placement::Other, rate, benchmark, bound);
    }
    goal("store-generators", StoreBenchmark, Placement::Other, rate, benchmark, Bound::AtLeast(2.0));
    let roomy = Against::Best(&[StoreRoomy]);
    goal("store-cleaning", Store, Placement::Other, Metric::RttP99Us, roomy, Bound::AtMost(1.5));
    for (case, metric, bound) in [
        ("store-cleaning", Metric::WrittenRatio, Bound::AtMost(2.5)),
        ("store-keys", Metric::KeyBytes, Bound::AtMost(100.0)),
        // Either is enough: the one with short records, or the other with long ones.
        ("store-keys", Metric::RecoveredKeysPerS, Bound::AtLeast(5e6)),
        ("store-keys-1400", Metric::RecoveredBytesPerS, Bound::AtLeast(1e9)),
    ] {
        goal(case, Store, Placement::Other, metric, Against::Absolute, bound);
    }
    let plain = Against::Best(&[HttpNone]);
    for case in ["store-post-1", "store-post-100"] {
        // As above, the second counts where the client is the limit.
        goal(case, StoreNone, Placement::Other, rate, plain, Bound::AtLeast(2.0));
        goal(case, StoreNone, Placement::Other, cpu, plain, Bound::AtMost(0.5));
    }
}

fn nfs(goals: &mut Vec<Goal>) {
    const SMALL: [&str; 6] =
        ["nfs-getattr", "nfs-lookup", "nfs-access", "nfs-read-4k", "nfs-write-4k", "nfs-readdirplus"];
    const MORE: [&str; 3] = ["nfs-listing-50000", "nfs-small-files-1x8", "nfs-sfs2008-1x8"];
    let placement = Placement::Other;
    let ganesha = Against::Best(&[Ganesha, GaneshaTuned]);
    // The kernel copies twice, out of the page cache and into TCP: what remains is the protocol.
    goals.push(Goal {
        case: "nfs-read-1m-4",
        subject: Nfs,
        placement,
        metric: Metric::MessagesPerS,
        against: Against::Best(&[PreadSend]),
        bound: Bound::AtLeast(0.8),
    });
    // GETATTR above NULL; here with all that NULL takes, too.
    goals.push(Goal {
        case: "nfs-getattr-32x8",
        subject: Nfs,
        placement,
        metric: Metric::ServerCpuUs,
        against: Against::Absolute,
        bound: Bound::AtMost(2.0),
    });
    let mut goal = |case, metric, bound| {
        goals.push(Goal { case, subject: Nfs, placement, metric, against: ganesha, bound });
    };
    for case in SMALL.into_iter().flat_map(by_depth).chain(MORE) {
        goal(case, Metric::MessagesPerS, Bound::AtLeast(3.0));
        goal(case, Metric::RttP99Us, Bound::AtMost(0.5));
    }
    for case in by_depth("nfs-read-1m").into_iter().chain(["nfs-read-1m-4"]) {
        goal(case, Metric::MessagesPerS, Bound::AtLeast(1.5));
    }
    for case in by_depth("nfs-stable-4k") {
        goal(case, Metric::MessagesPerS, Bound::AtLeast(2.0));
    }
}

fn ninep(goals: &mut Vec<Goal>) {
    const SMALL: [&str; 6] = ["9p-getattr", "9p-walk", "9p-read-32b", "9p-write-32b", "9p-read-4k", "9p-write-4k"];
    let placement = Placement::Other;
    let peers = Against::Best(&[Diod, Ganesha]);
    let mut goal = |case, metric, against, bound| {
        goals.push(Goal { case, subject: Ninep, placement, metric, against, bound });
    };
    for case in SMALL.into_iter().flat_map(by_depth) {
        goal(case, Metric::MessagesPerS, peers, Bound::AtLeast(3.0));
        goal(case, Metric::RttP99Us, peers, Bound::AtMost(0.5));
    }
    for case in by_depth("9p-read-512k") {
        goal(case, Metric::DataBytesPerS, peers, Bound::AtLeast(1.5));
    }
    goal("9p-busy-1-of-1000", Metric::IdleBytes, Against::Absolute, Bound::AtMost(16_384.0));
    goal("9p-ior", Metric::MessagesPerS, Against::Best(&[Ganesha]), Bound::AtLeast(3.0));
}
