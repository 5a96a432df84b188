//! Prints the tables of `docs/scheduling.md`: `cargo run --release -p ksf-mux-sim --example table`.

use ksf_mux_sim::{Costs, Load, ServiceTime, SimPolicy, Summary, simulate};

const SEED: u64 = 3;
const MIXED: ServiceTime = ServiceTime::Mixed { short_ns: 20_000, long_ns: 20_000_000, long_percent: 20 };
const POLICIES: [(&str, SimPolicy); 4] = [
    ("ours", SimPolicy::OURS),
    ("ideal queue", SimPolicy::Ideal),
    ("pinned", SimPolicy::Pinned),
    ("KCM", SimPolicy::Kcm),
];

fn main() {
    let even = |messages| Load { service: MIXED, utilisation: 0.4, burst: 1, weights: &[1; 64], messages };
    let loads = [
        ("Mixed times: 80 % take 20 us, 20 % take 20 ms; load 0.4, one message per segment", even(200_000)),
        ("The same, in bursts of 8 per segment", Load { burst: 8, ..even(200_000) }),
        (
            "Exponential times of 50 us; load 0.8",
            Load { service: ServiceTime::Exponential { mean_ns: 50_000 }, utilisation: 0.8, ..even(400_000) },
        ),
    ];
    for (name, load) in loads {
        latencies(name, &load);
    }
    capped(&even(200_000));
    skewed();
}

fn latencies(name: &str, load: &Load<'_>) {
    println!("### {name}\n");
    println!("Times of the quick messages in us: p50 / p99 / p99.9 (mean).\n");
    print!("| workers |");
    POLICIES.iter().for_each(|(name, _)| print!(" {name} |"));
    println!("\n|---|---|---|---|---|");
    for workers in [2, 4, 8, 16, 32, 64] {
        let arrivals = load.draw(workers, SEED);
        print!("| {workers} |");
        for (_, policy) in POLICIES {
            print!(" {} |", cell(&Summary::of(&arrivals, &simulate(policy, workers, Costs::TYPICAL, &arrivals))));
        }
        println!();
    }
    println!();
}

fn capped(load: &Load<'_>) {
    println!("### Mixed times, long messages capped at half of the workers\n");
    println!("| workers | ours | ours, capped |\n|---|---|---|");
    for workers in [2, 4, 8, 16, 32, 64] {
        let arrivals = load.draw(workers, SEED);
        let capped = SimPolicy::Ours { ordered: false, long_cap: Some(workers / 2) };
        let cells = [SimPolicy::OURS, capped]
            .map(|policy| cell(&Summary::of(&arrivals, &simulate(policy, workers, Costs::TYPICAL, &arrivals))));
        println!("| {workers} | {} | {} |", cells[0], cells[1]);
    }
    println!();
}

fn skewed() {
    println!("### Skew: connections with weights 3:1 per pair of workers, 100 us each, more than the workers can do\n");
    println!("Messages per second, and the gain over pinned connections.\n");
    println!("| workers | ours | pinned | KCM | gain | bound |\n|---|---|---|---|---|---|");
    for workers in [2, 4, 8, 16, 32, 64] {
        let weights: Vec<u32> = (0..workers).map(|worker| if worker % 2 == 0 { 3 } else { 1 }).collect();
        let service = ServiceTime::Fixed { ns: 100_000 };
        let load = Load { service, utilisation: 50.0, burst: 4, weights: &weights, messages: 200_000 };
        let arrivals = load.draw(workers, SEED);
        let rate = |policy| Summary::of(&arrivals, &simulate(policy, workers, Costs::TYPICAL, &arrivals)).per_second;
        let (ours, pinned, kcm) = (rate(SimPolicy::OURS), rate(SimPolicy::Pinned), rate(SimPolicy::Kcm));
        let bound = arrivals.skew(workers);
        println!("| {workers} | {ours:.0} | {pinned:.0} | {kcm:.0} | {:.2} | {bound:.2} |", ours / pinned);
    }
}

fn cell(summary: &Summary) -> String {
    let [p50, p99, p999] = [summary.p50_ns, summary.p99_ns, summary.p999_ns].map(|ns| ns as f64 / 1e3);
    format!("{p50:.0} / {p99:.0} / {p999:.0} ({:.0})", summary.mean_ns / 1e3)
}
