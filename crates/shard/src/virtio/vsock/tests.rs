//! Tests of the socket device.
