//! Real labs, through the command `mirrorball-lab`. They need qemu-system-x86_64 and a host kernel (see
//! `kernel`); without them these tests fail, they don't skip.

mod background;
mod command;
mod hosts;
mod links;
mod run;
