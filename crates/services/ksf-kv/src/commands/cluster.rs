//! `CLUSTER`, and which commands are for another node.

use std::fmt::Write;

use super::table::Asked;
use super::{Call, Failed, Result, SYNTAX};
use crate::cluster::{Cluster, Node, SLOTS, slot_of};

const DISABLED: &str = "ERR This instance has cluster support disabled";
const CROSS_SLOT: &str = "CROSSSLOT Keys in request don't hash to the same slot";

/// Refuses a command whose keys are in several slots, or on another node. Without a map of slots every key is here.
pub(super) fn route(call: &Call<'_, '_>, asked: Asked) -> Result {
    let Some(cluster) = &call.shard.settings.cluster else { return Ok(()) };
    let slot = if asked.name() == "exec" {
        // Of all that it carries out.
        let queued = call.session.transaction.queued().unwrap_or_default();
        let mut slot = None;
        for words in queued {
            let args: Vec<&[u8]> = words.iter().map(|word| &word[..]).collect();
            if let Some(asked) = Asked::of(&args) {
                slot = one_slot(slot, asked.keys(&args))?;
            }
        }
        slot
    } else {
        one_slot(None, asked.keys(call.args))?
    };
    match slot.and_then(|slot| Some((slot, cluster.elsewhere(slot)?))) {
        Some((slot, node)) => Err(Failed::from(format!("MOVED {slot} {node}"))),
        None => Ok(()),
    }
}

/// The slot of all of these, and of what came before.
fn one_slot<'a>(before: Option<u16>, keys: impl Iterator<Item = &'a [u8]>) -> Result<Option<u16>> {
    let mut slot = before;
    for key in keys {
        let own = slot_of(key);
        if slot.is_some_and(|slot| slot != own) {
            return Err(CROSS_SLOT.into());
        }
        slot = Some(own);
    }
    Ok(slot)
}

/// `READONLY` and `READWRITE`: there are no replicas that they could be about.
pub(super) fn readonly(call: &mut Call<'_, '_>) -> Result {
    if call.shard.settings.cluster.is_none() {
        return Err(DISABLED.into());
    }
    call.write().ok();
    Ok(())
}

/// `ASKING`: no slot is on its way to another node.
pub(super) fn asking(call: &mut Call<'_, '_>) -> Result {
    readonly(call)
}

pub(super) fn cluster(call: &mut Call<'_, '_>) -> Result {
    // What it is written with is borrowed from the call.
    let settings = std::sync::Arc::clone(&call.shard.settings);
    let Some(cluster) = &settings.cluster else { return Err(DISABLED.into()) };
    match &call.args[1].to_ascii_lowercase()[..] {
        b"count-failure-reports" => {
            node(cluster, call.args[2])?;
            call.write().integer(0);
        }
        b"countkeysinslot" => {
            let slot = slot(call, 2)?.ok_or("ERR Invalid slot")?;
            let mut count = 0;
            walk(call, slot, |_| {
                count += 1;
                Ok(true)
            })?;
            call.write().integer(count);
        }
        b"getkeysinslot" => return keys_in_slot(call),
        b"help" => super::about::help(call),
        b"info" => call.write().verbatim(&info(cluster)),
        b"keyslot" => {
            let slot = slot_of(call.args[2]);
            call.write().integer(slot.into());
        }
        b"links" => call.write().array(0),
        b"myid" => call.write().bulk(cluster.own().id.as_bytes()),
        b"nodes" => call.write().verbatim(&nodes(cluster)),
        b"replicas" | b"slaves" => {
            node(cluster, call.args[2])?;
            call.write().array(0);
        }
        b"shards" => shards(call, cluster),
        b"slots" => slots(call, cluster),
        // The table has no others.
        _ => return Err(SYNTAX.into()),
    }
    // In a transaction, there may be many of these replies.
    call.room().check()
}

/// The node of an id.
fn node<'c>(cluster: &'c Cluster, id: &[u8]) -> Result<&'c Node> {
    let unknown = || Failed::quoting("ERR Unknown node ", id, "");
    cluster.nodes.iter().find(|node| node.id.as_bytes() == id).ok_or_else(unknown)
}

/// An argument as a slot; `None`: the number is that of none.
fn slot(call: &Call<'_, '_>, at: usize) -> Result<Option<u16>> {
    Ok(u16::try_from(call.integer(at)?).ok().filter(|slot| *slot < SLOTS))
}

/// Goes through the keys of a slot, until `take` says that it is enough. It looks at every key.
fn walk(call: &mut Call<'_, '_>, slot: u16, mut take: impl FnMut(&[u8]) -> Result<bool>) -> Result {
    let mut taken = Ok(true);
    let needs = call.shard.shard.store().scan(b"", call.clock.now_ms, |key, _| {
        if slot_of(key) == slot {
            taken = take(key);
        }
        matches!(taken, Ok(true))
    });
    call.done.needs = needs;
    taken.map(|_| ())
}

fn keys_in_slot(call: &mut Call<'_, '_>) -> Result {
    let (slot, count) = (slot(call, 2)?, usize::try_from(call.integer(3)?).ok());
    let (Some(slot), Some(count)) = (slot, count) else {
        return Err("ERR Invalid slot or number of keys".into());
    };
    let (mut found, mut room): (Vec<Vec<u8>>, _) = (Vec::new(), call.room());
    if count > 0 {
        walk(call, slot, |key| {
            room.take(key.len())?;
            found.push(key.to_vec());
            Ok(found.len() < count)
        })?;
    }
    let mut to = call.write();
    to.array(found.len());
    found.iter().for_each(|key| to.bulk(key));
    Ok(())
}

fn info(cluster: &Cluster) -> String {
    let (nodes, own) = (cluster.nodes.len(), cluster.own_number());
    format!(
        "cluster_state:ok\r\ncluster_slots_assigned:{SLOTS}\r\ncluster_slots_ok:{SLOTS}\r\ncluster_slots_pfail:0\r\n\
         cluster_slots_fail:0\r\ncluster_known_nodes:{nodes}\r\ncluster_size:{nodes}\r\ncluster_current_epoch:{nodes}\r\n\
         cluster_my_epoch:{own}\r\ncluster_stats_messages_sent:0\r\ncluster_stats_messages_received:0\r\n\
         total_cluster_links_buffer_limit_exceeded:0\r\n"
    )
}

/// There is no bus between nodes, which the port behind the `@` would be.
fn nodes(cluster: &Cluster) -> String {
    let mut text = String::new();
    for (number, node) in (1..).zip(&cluster.nodes) {
        let role = if number == cluster.own_number() { "myself,master" } else { "master" };
        // Writing to a string does not fail.
        let _ = write!(text, "{} {node}@0 {role} - 0 0 {number} connected", node.id);
        for slots in &node.slots {
            let _ = match (slots.start(), slots.end()) {
                (first, last) if first == last => write!(text, " {first}"),
                (first, last) => write!(text, " {first}-{last}"),
            };
        }
        text.push('\n');
    }
    text
}

fn slots(call: &mut Call<'_, '_>, cluster: &Cluster) {
    let mut to = call.write();
    to.array(cluster.parts().count());
    for (slots, node) in cluster.parts() {
        to.array(3);
        to.integer((*slots.start()).into());
        to.integer((*slots.end()).into());
        to.array(4);
        to.bulk(node.host.as_bytes());
        to.integer(node.port.into());
        to.bulk(node.id.as_bytes());
        to.map(0);
    }
}

fn shards(call: &mut Call<'_, '_>, cluster: &Cluster) {
    let mut to = call.write();
    to.array(cluster.nodes.len());
    for node in &cluster.nodes {
        to.map(2);
        to.bulk(b"slots");
        to.array(2 * node.slots.len());
        for slots in &node.slots {
            to.integer((*slots.start()).into());
            to.integer((*slots.end()).into());
        }
        to.bulk(b"nodes");
        to.array(1);
        to.map(7);
        to.bulk(b"id");
        to.bulk(node.id.as_bytes());
        to.bulk(b"port");
        to.integer(node.port.into());
        for (name, value) in [("ip", &node.host[..]), ("endpoint", &node.host[..]), ("role", "master")] {
            to.bulk(name.as_bytes());
            to.bulk(value.as_bytes());
        }
        to.bulk(b"replication-offset");
        to.integer(0);
        to.bulk(b"health");
        to.bulk(b"online");
    }
}
