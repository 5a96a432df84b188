//! The half of ksf that runs in the kernel, and its loader.
