//! Host nodes that all memory is bound to.

use crate::parse;

#[test]
fn nodes_of_the_host_for_all_memory_are_read() {
    let spec = parse("vm.toml", "image = \"x\"\nmemory_nodes = [0, 3]\n").unwrap();
    assert_eq!(spec.memory_nodes, [0, 3]);
}
