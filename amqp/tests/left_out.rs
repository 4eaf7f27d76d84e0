//! Says, where there is no broker, that the end-to-end tests are left out: `cargo test` alone would not name them.

fn main() {
    if std::env::var_os("VRAMQ_TEST_AMQP_URL").is_none() {
        eprintln!(
            "\nNOT RUN: the end-to-end tests in tests/, which need RabbitMQ. `make test` starts one and runs all.\n"
        );
    }
}
