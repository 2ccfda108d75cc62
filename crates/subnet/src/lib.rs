//! Networks: TAP devices and unprivileged user-mode networking.
