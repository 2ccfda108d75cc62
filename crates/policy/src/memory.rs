//! Memory that cells share with one another.

pub mod borrowing;
