//! Spans: the cells of a VM that has one shard in each.

use std::fmt;
use std::str::FromStr;

use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Serialize};

use crate::cluster::CELLS_MAX;
use crate::fault::{Fault, fault};
use crate::size::Size;
use crate::validate::asked_to_share;
use crate::vm::{DiskDevice, PagesSpec, VmSpec};

/// Minimum memory of each shard, so that the guest's kernel accepts it as a NUMA node.
const SHARD_MIN_BYTES: u64 = 64 << 20;

/// Maximum coherent memory: page numbers reach 16 GiB.
const COHERENT_MAX_BYTES: u64 = 16 << 30;

/// Cells to span: `"auto"`, or a table with their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpanSpec {
    /// As few cells as have enough free resources; written `"auto"`.
    Auto,
    /// These cells, the first of them the VM's home; written `{ cells = [0, 1] }`.
    Cells(Vec<u16>),
    /// These cells, each with a copy of the VM's memory; written `{ cells = [0, 1], memory = "coherent" }`.
    Coherent(Vec<u16>),
}

/// Sharing of guest memory between shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SpanMemory {
    /// All memory is shared: hardware keeps it coherent.
    #[default]
    Shared,
    /// No memory is shared: each shard has a copy, and the shards keep the copies coherent.
    Coherent,
}

/// The table form.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[serde(rename = "span")]
struct Cells {
    cells: Vec<u16>,
    #[serde(default, skip_serializing_if = "is_shared")]
    memory: SpanMemory,
}

fn is_shared(memory: &SpanMemory) -> bool {
    *memory == SpanMemory::Shared
}

impl SpanSpec {
    /// Returns the named cells; none when Mirrorball is to choose.
    pub fn cells(&self) -> Option<&[u16]> {
        match self {
            Self::Auto => None,
            Self::Cells(cells) | Self::Coherent(cells) => Some(cells),
        }
    }

    /// Returns the sharing of memory between shards.
    pub fn memory(&self) -> SpanMemory {
        match self {
            Self::Auto | Self::Cells(_) => SpanMemory::Shared,
            Self::Coherent(_) => SpanMemory::Coherent,
        }
    }

    /// Returns the same cells with this kind of memory.
    ///
    /// # Errors
    /// If no cells are named and each is to have a copy.
    pub fn with_memory(self, memory: SpanMemory) -> Result<Self, SpanError> {
        match (self, memory) {
            (Self::Auto, SpanMemory::Shared) => Ok(Self::Auto),
            (Self::Auto, SpanMemory::Coherent) => Err(SpanError::CoherentAuto),
            (Self::Cells(cells) | Self::Coherent(cells), SpanMemory::Shared) => Ok(Self::Cells(cells)),
            (Self::Cells(cells) | Self::Coherent(cells), SpanMemory::Coherent) => Ok(Self::Coherent(cells)),
        }
    }
}

/// A flag that is no span, or no memory of one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpanError {
    /// Coherent memory in cells that are chosen later.
    #[error("each cell has a copy of coherent memory: name the cells, as 0,1")]
    CoherentAuto,
    /// Another kind of memory.
    #[error("{0:?} is no kind of memory: write shared or coherent")]
    Memory(String),
    /// No list of cells.
    #[error("{0:?} are not cells: write `auto`, or their numbers, as 0,1")]
    Cells(String),
}

impl FromStr for SpanMemory {
    type Err = SpanError;
    fn from_str(text: &str) -> Result<Self, SpanError> {
        match text {
            "shared" => Ok(Self::Shared),
            "coherent" => Ok(Self::Coherent),
            _ => Err(SpanError::Memory(text.to_owned())),
        }
    }
}

impl Serialize for SpanSpec {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Cells(cells) | Self::Coherent(cells) => Cells {
                cells: cells.clone(),
                memory: self.memory(),
            }
            .serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for SpanSpec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = SpanSpec;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"auto\" or { cells = [0, 1] }")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<SpanSpec, E> {
                match text {
                    "auto" => Ok(SpanSpec::Auto),
                    _ => Err(E::custom(format!(
                        "{text:?} is no span: write \"auto\" or {{ cells = [0, 1] }}"
                    ))),
                }
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<SpanSpec, A::Error> {
                let table = Cells::deserialize(MapAccessDeserializer::new(map))?;
                SpanSpec::Cells(table.cells)
                    .with_memory(table.memory)
                    .map_err(serde::de::Error::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// Parses the value of a flag: `auto`, or `0,1`.
impl FromStr for SpanSpec {
    type Err = SpanError;
    fn from_str(text: &str) -> Result<Self, SpanError> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let cells: Result<Vec<u16>, _> = text.split(',').map(str::parse).collect();
        cells
            .map(Self::Cells)
            .map_err(|_| SpanError::Cells(text.to_owned()))
    }
}

#[cfg(feature = "schema")]
impl utoipa::PartialSchema for SpanSpec {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, OneOfBuilder, Type};
        let auto = ObjectBuilder::new()
            .schema_type(Type::String)
            .enum_values(Some(["auto"]));
        let numbers = ArrayBuilder::new().items(u16::schema());
        let memory = ObjectBuilder::new()
            .schema_type(Type::String)
            .enum_values(Some(["shared", "coherent"]));
        let cells = ObjectBuilder::new()
            .property("cells", numbers)
            .required("cells")
            .property("memory", memory);
        OneOfBuilder::new()
            .description(Some(
                "Cells to span: `\"auto\"`, as few as have the room, or a table with their numbers, the \
                 VM's home first.",
            ))
            .item(auto)
            .item(cells)
            .into()
    }
}

#[cfg(feature = "schema")]
impl utoipa::ToSchema for SpanSpec {}

/// Checks the properties of a span that don't depend on the cluster.
pub(crate) fn check(spec: &VmSpec) -> Result<(), Fault> {
    let Some(span) = &spec.span else {
        return Ok(());
    };
    if let Some(cells) = span.cells() {
        check_cells(spec, cells)?;
    }
    if span.memory() == SpanMemory::Coherent {
        check_coherent(spec)?;
    }
    if spec.cell.is_some() {
        let what = "a cell, and a span: the VM runs in the span's cells";
        return Err(fault(&["cell"], what, "leave out `cell`, or `span`")
            .or_by_flag("leave out `--cell`, or `--span`"));
    }
    if !spec.nodes.is_empty() {
        return Err(fault(
            &["nodes"],
            "nodes, and a span: the guest has a node for each cell",
            "leave out `nodes`, or `span`",
        ));
    }
    if matches!(spec.pages, PagesSpec::Huge2M | PagesSpec::Huge1G) {
        return Err(fault(
            &["pages"],
            "a spanning VM's memory can't be in the host's pool of huge pages",
            "use `pages = \"thp\"` or `\"4K\"`",
        )
        .or_by_flag("use `--pages thp` or `4K`"));
    }
    // Its region would have to be mapped in every shard.
    if let Some(number) = spec.disks.iter().position(|disk| disk.device == DiskDevice::Pmem) {
        return Err(fault(
            &["disks", &number.to_string(), "as"],
            "a spanning VM has no persistent memory",
            "leave out `as`, or `span`",
        ));
    }
    // A page would have to be exchanged in all shards at once, which is not implemented.
    if let Some(path) = asked_to_share(spec) {
        let path: Vec<_> = path.iter().map(String::as_str).collect();
        return Err(fault(
            &path,
            "a spanning VM shares no memory with other VMs",
            "leave out `share`, or use `share = \"never\"`",
        )
        .or_by_flag("leave out `--share`, or use `--share never`"));
    }
    Ok(())
}

/// Refuses options that conflict with fetching every page separately.
fn check_coherent(spec: &VmSpec) -> Result<(), Fault> {
    if spec.pages != PagesSpec::Small {
        return Err(fault(
            &["pages"],
            "coherent memory is kept in pages of 4 KiB",
            "use `pages = \"4K\"`, or leave out `memory` of `span`",
        )
        .or_by_flag("use `--pages 4K`, or leave out `--span-memory`"));
    }
    if spec.prefault {
        return Err(fault(
            &["prefault"],
            "pages of coherent memory come when they are used",
            "leave out `prefault`, or `memory` of `span`",
        ));
    }
    if spec.memory.0 > COHERENT_MAX_BYTES {
        let message = format!("{} of coherent memory", spec.memory);
        let most = Size(COHERENT_MAX_BYTES);
        let help = format!("write `memory = \"{most}\"` at most, or leave out `memory` of `span`");
        return Err(fault(&["memory"], message, help).or_by_flag(format!(
            "use `--memory {most}` at most, or leave out `--span-memory`"
        )));
    }
    Ok(())
}

fn check_cells(spec: &VmSpec, cells: &[u16]) -> Result<(), Fault> {
    let refused = |message: String, help: &str| fault(&["span", "cells"], message, help);
    if cells.is_empty() {
        return Err(refused(
            "no cells to span".into(),
            "name one or more, as `cells = [0, 1]`, or write `span = \"auto\"`",
        ));
    }
    if cells.len() > CELLS_MAX {
        return Err(refused(format!("{} cells", cells.len()), "name 64 at most"));
    }
    for (index, cell) in cells.iter().enumerate() {
        if cells[..index].contains(cell) {
            let at = ["span", "cells", &index.to_string()];
            return Err(fault(&at, format!("cell {cell} is named twice"), "name it once"));
        }
    }
    if usize::from(spec.cpus) < cells.len() {
        let message = format!("{} cells need a vCPU each, and it has {}", cells.len(), spec.cpus);
        let help = format!("write `cpus = {}` or more, or name fewer cells", cells.len());
        let by_flag = format!("add `--cpus {}` or more, or name fewer cells", cells.len());
        return Err(refused(message, &help).or_by_flag(by_flag));
    }
    let least = SHARD_MIN_BYTES * cells.len() as u64;
    if spec.memory.0 < least {
        let message = format!(
            "{} cells for {} of memory: each has {} at least",
            cells.len(),
            spec.memory,
            Size(SHARD_MIN_BYTES)
        );
        let help = format!(
            "write `memory = \"{}\"` or more, or name fewer cells",
            Size(least)
        );
        let by_flag = format!("add `--memory {}` or more, or name fewer cells", Size(least));
        return Err(refused(message, &help).or_by_flag(by_flag));
    }
    Ok(())
}
