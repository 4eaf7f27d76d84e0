//! `vramq-worker`: see [`vramq_worker::app`].

fn main() {
    vramq_worker::app::main();
}
