//! The guest's kernel command line: Mirrorball's parameters, then the image's, then the user's. Of parameters
//! with one name Linux mostly takes the last, so the user's win.

use config::VmSpec;

use crate::coherence;

/// Mirrorball's parameters: the console is the serial port, and a panic ends the VM.
const OWN: &str = "console=ttyS0 panic=-1 quiet";
/// Parameters for an image that has none.
const ROOT: &str = "root=/dev/vda rw";

/// The command line of a VM, with the parameters of its image if that has some.
pub fn joined(spec: &VmSpec, image: Option<&str>) -> String {
    let image = image.map(|words| if words.is_empty() { ROOT } else { words });
    let said = [image.unwrap_or_default(), spec.cmdline()];
    let said = said.into_iter().filter(|words| !words.is_empty());
    let mut cmdline = said.collect::<Vec<_>>().join(" ");
    if spec.is_coherent() {
        cmdline = coherence::coherent_cmdline(&cmdline);
    }
    format!("{OWN} {cmdline}").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> VmSpec {
        config::parse("vm.toml", text).unwrap()
    }

    #[test]
    fn the_user_s_words_come_behind_those_of_the_image() {
        let own = spec("image = \"x\"\n[kernel]\ncmdline = \"root=/dev/vdb quiet=no\"");
        assert_eq!(
            joined(&own, Some("console=ttyS0 root=/dev/vda rw")),
            "console=ttyS0 panic=-1 quiet console=ttyS0 root=/dev/vda rw root=/dev/vdb quiet=no"
        );
        assert_eq!(
            joined(&own, Some("")),
            "console=ttyS0 panic=-1 quiet root=/dev/vda rw root=/dev/vdb quiet=no"
        );
    }

    #[test]
    fn without_the_image_or_the_user_there_are_only_the_others_words() {
        let kernel = spec("[kernel]\npath = \"vmlinuz\"\ncmdline = \"debug\"");
        assert_eq!(joined(&kernel, None), "console=ttyS0 panic=-1 quiet debug");
        let kernel = spec("[kernel]\npath = \"vmlinuz\"");
        assert_eq!(joined(&kernel, None), "console=ttyS0 panic=-1 quiet");
        let image = spec("image = \"x\"");
        assert_eq!(joined(&image, Some("rw")), "console=ttyS0 panic=-1 quiet rw");
    }

    #[test]
    fn parameters_of_a_coherent_guest_never_come_after_the_users() {
        let text = "image = \"x\"\ncpus = 2\nshare = \"never\"\n\
                    span = { cells = [0, 1], memory = \"coherent\" }\n\
                    [kernel]\ncmdline = \"psi=1 -- emergency\"";
        assert_eq!(
            joined(&spec(text), Some("rw skew_tick=0")),
            "console=ttyS0 panic=-1 quiet maxcpus=1 mirrorball.cpus=late nowatchdog \
             sysctl.vm.stat_interval=60 sysctl.vm.compaction_proactiveness=0 numa_balancing=disable \
             transparent_hugepage=never relax_domain_level=3 rw skew_tick=0 psi=1 -- emergency"
        );
    }
}
