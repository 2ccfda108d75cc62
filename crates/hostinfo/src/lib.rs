//! Facts of this host, and measurements on it.
//!
//! | module | gives |
//! | --- | --- |
//! | [`topology`] | nodes, CPUs, caches and devices, from sysfs |
//! | [`measure`] | the cost of messages between CPUs and to other hosts |
//! | [`facts`] | all facts: found, measured and asserted ones, and those of the cluster's cells |
//! | [`capacity`] | the free capacity of cells, from their reports, facts and assertions |
//! | [`nodes`] | the NUMA nodes of a spanning VM's guest |
//! | [`cpu_time`] | busy time of each CPU |
//! | [`thread_migrations`] | moves of a thread between CPUs |
//! | [`kvm_statistics`] | halts and exits of a vCPU, from KVM's statistics |
//! | [`memory_use`] | what running VMs take of the host's memory |
//! | [`pressure`] | how short of memory the host is |
//! | [`scanner`] | the kernel's scanner for equal pages, its result and its CPU time |
//!
//! It reads sysfs, `/proc`, and the files of [`registry`], and writes only the measurements that it keeps in
//! the runtime directory. It decides nothing: rules over facts are in `knowledge`, decisions in `policy`.
//! Callers are the command, `mirrorball-api`, cells, monitors, and the simulator, which takes the division
//! into cells from here.
//!
//! Unreadable sources are skipped: a host without NUMA or a container without PCI devices yields fewer facts,
//! and no error.

pub mod capacity;
pub mod cpu_time;
pub mod facts;
pub mod kvm_statistics;
pub mod measure;
pub mod memory_use;
pub mod nodes;
pub mod pressure;
pub mod scanner;
pub mod thread_migrations;
pub mod topology;
