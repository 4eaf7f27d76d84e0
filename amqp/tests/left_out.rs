//! Lists the end-to-end tests as ignored if there is no broker, because a bare `cargo test` would not name them.

fn main() {
    if std::env::var_os("VRAMQ_TEST_AMQP_URL").is_none() {
        eprintln!(
            "\nNOT RUN: the end-to-end tests in tests/, which need RabbitMQ. `make test` starts one and runs all.\n"
        );
    }
}
