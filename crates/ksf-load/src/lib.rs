//! Load generators that verify every reply.
