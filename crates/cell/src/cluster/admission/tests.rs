use super::*;

#[test]
fn free_memory_of_a_cell_counts_what_it_has_lent_and_borrowed() {
    let cell = CellStatus {
        plan: CellPlan {
            number: 1,
            host: None,
            cpus: vec![2, 3],
            nodes: vec![1],
            memory_bytes: 1000,
        },
        pid: 1,
        life: Some(1),
        failed: false,
        cordoned: false,
        given_bytes: 300,
        lent: vec![Part { cell: 0, bytes: 200 }],
        borrowed: vec![Part { cell: 2, bytes: 50 }],
        vcpus: 1,
        vms: vec!["secret".to_owned()],
    };
    let room = room(&cell);
    assert_eq!((room.number, room.free_bytes), (1, 550));
    assert!(!serde_json::to_string(&room).unwrap().contains("secret"));
    let full = CellStatus {
        given_bytes: 5000,
        ..cell
    };
    assert_eq!(super::room(&full).free_bytes, 0);
}
