use proptest::prelude::*;

use crate::parse;

fn fault(text: &str) -> (String, String) {
    let error = parse("vm.toml", text).unwrap_err();
    (error.message, error.mend.unwrap_or_default())
}

#[test]
fn an_unknown_key_is_named_with_its_neighbour() {
    let (message, mend) = fault("image = \"debian-12\"\nmemry = \"1G\"\n");
    assert!(message.starts_with("unknown field `memry`"), "{message}");
    assert_eq!(mend, "did you mean `memory`?");
}

#[test]
fn a_size_without_a_unit_is_refused() {
    let (message, _) = fault("image = \"debian-12\"\nmemory = 512\n");
    assert_eq!(message, "the size 512 has no unit: write \"512M\" or \"512G\"");
}

#[test]
fn a_bad_value_is_pointed_at() {
    let text = "image = \"debian-12\"\nmemory = \"32M\"\n";
    let error = parse("vm.toml", text).unwrap_err();
    let span = error.span.unwrap();
    assert_eq!(&text[span.offset()..span.offset() + span.len()], "\"32M\"");
}

#[test]
fn a_vm_without_a_kernel_is_refused() {
    assert_eq!(fault("cpus = 2\n").0, "neither an image nor a kernel to boot");
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC*") {
        let _ = parse("any", &text).map_err(|error| format!("{:?}", miette::Report::new(error)));
    }
}
