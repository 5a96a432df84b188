//! The multiplexor's scheduler, baton and out-queue, compiled against primitives that try one schedule of their threads
//! after the other.
