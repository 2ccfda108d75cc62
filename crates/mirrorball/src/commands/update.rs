//! `update`: changes what a running VM uses of its host.

use std::process::ExitCode;
use std::str::FromStr;

use config::{Size, cpulist};
use miette::{Result, miette};
use registry::control::Request;
use registry::update::{Pin, Update};

use super::clients::{ORDER_LIMIT, order};

/// CPUs of a host at most.
const HOST_CPUS_MAX: usize = 1024;

/// Flags of `update`.
#[derive(Debug, clap::Args)]
pub struct UpdateArgs {
    /// The VM
    vm: String,
    /// Its part of CPUs that VMs share, 1 to 10000, or none
    #[arg(long, value_name = "WEIGHT|none")]
    cpu_weight: Option<OrNone<u16>>,
    /// As many of the host's CPUs it uses at most, as 1.5, or none
    #[arg(long, value_name = "CPUS|none")]
    cpu_limit: Option<OrNone<f64>>,
    /// Memory of the host that its processes use at most, as 700M, or none
    #[arg(long, value_name = "SIZE|none")]
    memory_limit: Option<OrNone<Size>>,
    /// A vCPU and the CPUs of the host that it runs on, as 0=2 or 1=2-3, or 1=all; several times for several
    #[arg(long, value_name = "VCPU=CPUS")]
    pin: Vec<PinArg>,
}

/// A value, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
struct OrNone<T>(Option<T>);

impl<T: FromStr> FromStr for OrNone<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> std::result::Result<Self, T::Err> {
        match text {
            "none" => Ok(Self(None)),
            text => text.parse().map(|value| Self(Some(value))),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
struct PinArg(Pin);

impl FromStr for PinArg {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Self, &'static str> {
        const HELP: &str = "write a vCPU and CPUs of the host, as 0=2 or 1=2-3, or 1=all";
        let (vcpu, cpus) = text.split_once('=').ok_or(HELP)?;
        let vcpu = vcpu.parse().map_err(|_| HELP)?;
        let cpus = match cpus {
            "all" => Vec::new(),
            list => cpulist::parse_below(list, HOST_CPUS_MAX).ok_or(HELP)?,
        };
        Ok(Self(Pin { vcpu, cpus }))
    }
}

/// Changes what a VM uses of its host.
pub fn update(args: UpdateArgs) -> Result<ExitCode> {
    if let Some(OrNone(Some(limit))) = args.cpu_limit
        && !limit.is_finite()
    {
        return Err(miette!(
            help = "write a number of CPUs, as 1.5, or none",
            "--cpu-limit {limit}: no number of CPUs"
        ));
    }
    let update = Update {
        cpu_weight: args.cpu_weight.map(|OrNone(weight)| weight),
        cpu_limit: args.cpu_limit.map(|OrNone(limit)| limit),
        memory_limit: args.memory_limit.map(|OrNone(limit)| limit),
        pins: args.pin.into_iter().map(|PinArg(pin)| pin).collect(),
    };
    if update.is_empty() {
        return Err(miette!(
            help = "name one of --cpu-weight, --cpu-limit, --memory-limit and --pin",
            "{}: nothing is to change",
            args.vm
        ));
    }
    order(&args.vm, &Request::Update(update), ORDER_LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_and_values_that_may_be_none_are_read_as_people_write_them() {
        let pin = |vcpu, cpus: &[usize]| {
            PinArg(Pin {
                vcpu,
                cpus: cpus.to_vec(),
            })
        };
        assert_eq!("0=2".parse(), Ok(pin(0, &[2])));
        assert_eq!("253=0-1,1000".parse(), Ok(pin(253, &[0, 1, 1000])));
        assert_eq!("1=all".parse(), Ok(pin(1, &[])));
        for wrong in [
            "", "0", "=1", "0=", "-1=2", "256=1", "0=1024", "0=2-1", "0=none", "a=b",
        ] {
            assert!(wrong.parse::<PinArg>().is_err(), "{wrong}");
        }
        assert_eq!("none".parse(), Ok(OrNone::<u16>(None)));
        assert_eq!("7".parse(), Ok(OrNone(Some(7_u16))));
        assert!("many".parse::<OrNone<u16>>().is_err());
    }
}
