//! The service: NFS 3 and MOUNT 3 by their program numbers. There are no locks: NLM gets PROG_UNAVAIL, as every program that is
//! not in the table.

use ksf::framing::Framing;
use ksf::{Message, Order, Peer, Profile, Refused, Reply, Service, Turn, Unlogged};
use ksf_fs::WarmTurn;
use ksf_proto::oncrpc::MOUNT_PROGRAM;
use ksf_services::rpc::{Program, ProgramTable, TableError};

use crate::activity::Connection;
use crate::mount::MountProgram;
use crate::program::NfsProgram;
use crate::server::transfer_bytes_max;

/// Answers the programs of an NFSv3 server.
pub struct NfsService {
    pub(crate) name: String,
    pub(crate) programs: ProgramTable,
    pub(crate) nfs: NfsProgram,
    pub(crate) mount: MountProgram,
}

/// NFS 3 and MOUNT 3.
///
/// # Errors
///
/// None: their numbers are not the same.
pub(crate) fn programs() -> Result<ProgramTable, TableError> {
    let mut programs = ProgramTable::new();
    programs.register(Program::NFS_V3)?;
    programs.register(Program::MOUNT_V3)?;
    Ok(programs)
}

impl NfsService {
    /// The programs that it answers.
    pub fn programs(&self) -> &ProgramTable {
        &self.programs
    }
}

impl Service for NfsService {
    type Shard = WarmTurn;
    type Conn = Connection;
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile {
            // RFC 5531 section 9: the xid matches replies with calls, their order does not.
            order: Order::Free,
            // The data of a WRITE lie where they were received until they are in the file.
            keeps_messages: true,
            turn_ends: true,
            ..Profile::new(&self.name, Framing::RecordMark)
        }
    }

    fn start(&self, _: &mut Turn<'_>) -> std::io::Result<WarmTurn> {
        Ok(WarmTurn::default())
    }

    fn turn_end(&self, turn: &mut WarmTurn, _: &mut Turn<'_>) {
        turn.end();
    }

    fn accept(&self, _: &mut WarmTurn, peer: &Peer) -> Result<Connection, Refused> {
        Ok(self.nfs.core.activity.connect(peer))
    }

    fn call(&self, turn: &mut WarmTurn, connection: &mut Connection, message: &Message<'_>, reply: &mut Reply<'_>) {
        let bytes_max = transfer_bytes_max(reply.limits()).min(self.nfs.core.transfer_bytes_max);
        self.programs.call(message, reply, |call, reply| match call.program {
            MOUNT_PROGRAM => self.mount.call(&connection.account, call, reply),
            _ => self.nfs.call(turn, connection, bytes_max, call, reply),
        });
    }

    fn reply_bytes(&self, _: &mut WarmTurn, _: &mut Connection, message: &[u8]) -> usize {
        self.nfs.reply_bytes(message)
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.programs.counters()
    }
}
