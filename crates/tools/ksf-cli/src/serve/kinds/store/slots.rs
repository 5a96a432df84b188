//! The map of slots of a store: in a file of its own, or in that of the services.

use std::path::{Path, PathBuf};

use ksf_kv::cluster::{Cluster, ClusterError, NodeSpec};
use serde::Deserialize;

use crate::output::{Failure, Status};
use crate::toml_file;

/// A node of a map, as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeTable {
    /// Where clients reach it.
    address: String,
    /// Its slots.
    slots: String,
}

/// A file with a map, which is the same for all nodes.
#[derive(Debug, Deserialize)]
struct MapFile {
    cluster: Vec<NodeTable>,
}

/// Where the map of slots of a store is.
#[derive(Debug)]
pub(super) enum SlotMap {
    /// With the other keys of the store.
    Here(Cluster),
    /// In a file.
    File {
        /// The file.
        file: PathBuf,
        /// The address of this node in it.
        node: String,
    },
}

fn cluster(nodes: Vec<NodeTable>, own: &str) -> Result<Cluster, ClusterError> {
    let spec = |NodeTable { address, slots }| NodeSpec { address, slots };
    Cluster::new(&nodes.into_iter().map(spec).collect::<Vec<_>>(), own)
}

impl SlotMap {
    /// What the table of a service says; `None`: nothing. An error is in words.
    pub(super) fn of(
        nodes: Option<Vec<NodeTable>>,
        file: Option<PathBuf>,
        own: Option<String>,
    ) -> Result<Option<Self>, String> {
        match (nodes, file, own) {
            (None, None, None) => Ok(None),
            (Some(_), Some(_), _) => {
                Err("the map of slots is in `cluster` or in `cluster_file`, not in both".to_owned())
            }
            (None, None, Some(_)) => Err("`cluster_node` is a node of a map: `cluster` or `cluster_file`".to_owned()),
            (_, _, None) => Err("`cluster_node` says which node of the map of slots this is".to_owned()),
            (Some(nodes), None, Some(own)) => match cluster(nodes, &own) {
                Ok(cluster) => Ok(Some(Self::Here(cluster))),
                Err(error) => Err(error.to_string()),
            },
            (None, Some(file), Some(node)) => Ok(Some(Self::File { file, node })),
        }
    }

    /// The map.
    pub(super) fn read(&self) -> Result<Cluster, Failure> {
        match self {
            Self::Here(cluster) => Ok(cluster.clone()),
            Self::File { file, node } => read(file, node),
        }
    }
}

fn read(file: &Path, own: &str) -> Result<Cluster, Failure> {
    let MapFile { cluster: nodes } = toml_file::read_plain(file)?;
    cluster(nodes, own).map_err(|error| {
        let remedy = match error {
            ClusterError::NotInMap(_) => "name one of its nodes with --cluster-node",
            _ => "correct that file, and give the same to every node",
        };
        Failure::new(Status::Config, format!("{}: {error}", file.display())).remedy(remedy)
    })
}
