//! Packets to the CPU that wants them: ports, programs and policies, on frames and on real connections.

mod common;
mod frames;
mod locality;
mod packets;
mod ports;
mod twins;
