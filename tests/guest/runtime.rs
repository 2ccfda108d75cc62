//! Functions that the compiler calls implicitly. They are in assembly: a loop that copies would become a call
//! to itself.

use core::arch::global_asm;

global_asm!(
    ".text",
    ".global memcpy, memset, bcmp, rust_eh_personality",
    "memcpy:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "rep movsb",
    "ret",
    "memset:",
    "mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    "bcmp:",
    "xor eax, eax",
    "mov rcx, rdx",
    "repe cmpsb",
    "setne al",
    "ret",
    // Named by unused tables of the core library: nothing here unwinds.
    "rust_eh_personality:",
    "ud2",
);
