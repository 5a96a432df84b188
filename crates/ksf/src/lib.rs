//! Network services at kernel speed: the framework.
