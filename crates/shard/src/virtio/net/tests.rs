//! Tests of the card.
