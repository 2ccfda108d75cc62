//! Host nodes that all memory is bound to.

use super::refused;
use crate::parse;

#[test]
fn nodes_of_the_host_for_all_memory_are_numbers_once_and_exclude_other_places_of_it() {
    let spec = parse("vm.toml", "image = \"x\"\nmemory_nodes = [0, 3]\n").unwrap();
    assert_eq!(spec.memory_nodes, [0, 3]);
    for (text, why) in [
        ("memory_nodes = [1024]\n", "1024 is no node of a host"),
        ("memory_nodes = [0, 1, 0]\n", "node 0 is named twice"),
        (
            "memory_nodes = [0]\n[[nodes]]\ncpus = \"0\"\nmemory = \"512M\"\nhost_node = 0\n",
            "the guest's nodes have a `host_node`",
        ),
        (
            "memory_nodes = [0]\nshare = \"never\"\nspan = { cells = [0, 1] }\ncpus = 2\n",
            "the memory of a VM that spans cells lies in these",
        ),
    ] {
        let shown = refused(&format!("image = \"x\"\n{text}"));
        assert!(shown.contains(why), "{text}: {shown}");
        assert!(shown.contains("help: "), "{text}: {shown}");
    }
}
