//! Message kinds on a wire: an enum and its bytes in one list.

/// Declares an enum of kinds, each with its byte on the wire.
///
/// The list is the only place that names the bytes: [`byte`](#method.byte) and `from_byte` come from it, and
/// two kinds with the same byte do not compile. Where the owner of a wire matches on the enum without a
/// catch-all arm, a kind that is added to the list and forgotten there does not compile either.
#[macro_export]
macro_rules! wire_kinds {
    ($(#[$about:meta])* $sight:vis enum $name:ident {
        $($(#[$doc:meta])* $kind:ident = $byte:literal,)+
    }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[repr(u8)]
        $sight enum $name {
            $($(#[$doc])* $kind = $byte,)+
        }

        impl $name {
            /// The byte on the wire.
            $sight const fn byte(self) -> u8 {
                self as u8
            }

            /// The kind that has this byte, if one has.
            $sight const fn from_byte(byte: u8) -> Option<Self> {
                match byte {
                    $($byte => Some(Self::$kind),)+
                    _ => None,
                }
            }
        }
    };
}
