//! What the guest tests share: starting VMs, waiting with limits, measuring memory.
