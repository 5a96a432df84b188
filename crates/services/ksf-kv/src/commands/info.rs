//! `INFO`.

use super::backup::LogFiles;
use super::server::REDIS_VERSION;
use super::{Call, Result};

/// Names that stand for all sections.
const ALL: [&str; 3] = ["all", "default", "everything"];

pub(super) fn info(call: &mut Call<'_, '_>) -> Result {
    let asked: Vec<_> = call.args[1..].iter().map(|name| String::from_utf8_lossy(name).to_ascii_lowercase()).collect();
    let is_asked = |title: &str| {
        let wants = |name: &String| ALL.contains(&&name[..]) || name.eq_ignore_ascii_case(title);
        asked.is_empty() || asked.iter().any(wants)
    };
    let mut text = String::new();
    for (title, lines) in SECTIONS {
        if is_asked(title) {
            let gap = if text.is_empty() { "" } else { "\r\n" };
            text.push_str(&format!("{gap}# {title}\r\n{}", lines(call)));
        }
    }
    call.room().take(text.len())?;
    call.write().verbatim(&text);
    Ok(())
}

/// The title of a section, and its lines.
type Section = (&'static str, fn(&Call<'_, '_>) -> String);

const SECTIONS: [Section; 7] = [
    ("Server", server),
    ("Clients", clients),
    ("Memory", memory),
    ("Persistence", persistence),
    ("Replication", replication),
    ("Cluster", cluster),
    ("Keyspace", keyspace),
];

fn server(call: &Call<'_, '_>) -> String {
    format!(
        "redis_version:{REDIS_VERSION}\r\nksf_version:{}\r\nredis_mode:{}\r\nprocess_id:{}\r\n",
        env!("CARGO_PKG_VERSION"),
        super::server::mode(call),
        std::process::id(),
    )
}

fn clients(call: &Call<'_, '_>) -> String {
    format!("connected_clients:{}\r\nblocked_clients:0\r\n", call.shard.clients.count())
}

fn memory(call: &Call<'_, '_>) -> String {
    let sizes = call.shard.shard.store().memory().sizes();
    format!(
        "used_memory:{}\r\nused_memory_dataset:{}\r\nmaxmemory:{}\r\nmaxmemory_policy:noeviction\r\n\
         ksf_values_in_memory_bytes:{}\r\nksf_values_on_disk:{}\r\nksf_values_on_disk_bytes:{}\r\n",
        sizes.used,
        sizes.used,
        super::server::maxmemory(call),
        sizes.values,
        sizes.away,
        sizes.away_bytes,
    )
}

fn persistence(call: &Call<'_, '_>) -> String {
    // What clients and exporters look at, in the words of a Redis with an append-only file: each write goes to the log at once, so
    // no snapshot is due, and a write that fails ends the process.
    let LogFiles { geometry, places, files } = &*call.shard.for_backups;
    format!(
        "loading:0\r\nasync_loading:0\r\n\
         rdb_changes_since_last_save:0\r\nrdb_bgsave_in_progress:0\r\nrdb_last_save_time:{}\r\n\
         rdb_last_bgsave_status:ok\r\nrdb_last_bgsave_time_sec:-1\r\nrdb_current_bgsave_time_sec:-1\r\n\
         aof_enabled:1\r\naof_rewrite_in_progress:0\r\naof_rewrite_scheduled:0\r\n\
         aof_last_rewrite_time_sec:-1\r\naof_current_rewrite_time_sec:-1\r\naof_last_bgrewrite_status:ok\r\n\
         aof_last_write_status:ok\r\naof_current_size:{}\r\naof_buffer_length:{}\r\n\
         aof_pending_bio_fsync:0\r\naof_delayed_fsync:0\r\nksf_durability:{}\r\n\
         ksf_medium:{}\r\nksf_survives_power_cut:{}\r\n",
        call.clock.now_ms / 1000,
        geometry.segment_bytes * u64::from(*places) * files.len() as u64,
        call.shard.shard.log().unwritten_bytes(),
        call.shard.settings.durability,
        call.shard.medium,
        u8::from(call.shard.medium.survives_power_cut()),
    )
}

fn replication(_: &Call<'_, '_>) -> String {
    "role:master\r\nconnected_slaves:0\r\n".to_owned()
}

fn cluster(call: &Call<'_, '_>) -> String {
    format!("cluster_enabled:{}\r\n", u8::from(call.shard.settings.cluster.is_some()))
}

fn keyspace(call: &Call<'_, '_>) -> String {
    format!("db0:keys={},expires=0,avg_ttl=0\r\n", call.shard.shard.store().keys())
}
