use proptest::prelude::*;

use crate::parse;
