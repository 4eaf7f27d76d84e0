//! Macros that make several tests of one test body: a test for each set-up.

/// Makes one test per kind of queue and encoding out of each async function over a `TestEnv`.
#[macro_export]
macro_rules! on_all_setups {
    ($($(#[$attribute:meta])* $body:ident),+ $(,)?) => { $(
        mod $body {
            $crate::test_over!(run, quorum_json, Quorum, Json, $body, $(#[$attribute])*);
            $crate::test_over!(run, quorum_bincode, Quorum, Bincode, $body, $(#[$attribute])*);
            $crate::test_over!(run, classic_json, Classic, Json, $body, $(#[$attribute])*);
            $crate::test_over!(run, classic_bincode, Classic, Bincode, $body, $(#[$attribute])*);
        }
    )+ };
}

/// The same in MessagePack, on a quorum queue: for bodies that `on_all_setups!` runs in the other encodings.
#[macro_export]
macro_rules! in_message_pack {
    ($($(#[$attribute:meta])* $body:ident),+ $(,)?) => {
        mod message_pack {
            // The bodies; the modules of the same names are shadowed.
            use super::*;
            $(
                mod $body {
                    $crate::test_over!(run, quorum_message_pack, Quorum, MessagePack, $body, $(#[$attribute])*);
                }
            )+
        }
    };
}

/// The same where the encoding makes no difference: one test per kind of queue, in JSON.
#[macro_export]
macro_rules! on_queue_types {
    ($($(#[$attribute:meta])* $body:ident),+ $(,)?) => { $(
        mod $body {
            $crate::test_over!(run, quorum, Quorum, Json, $body, $(#[$attribute])*);
            $crate::test_over!(run, classic, Classic, Json, $body, $(#[$attribute])*);
        }
    )+ };
}

/// Where neither makes a difference: one test, on a quorum queue, in JSON.
#[macro_export]
macro_rules! on_one_setup {
    ($($(#[$attribute:meta])* $body:ident),+ $(,)?) => { $(
        mod $body {
            $crate::test_over!(run, quorum_json, Quorum, Json, $body, $(#[$attribute])*);
        }
    )+ };
}

/// Where the broker itself is ill-treated: on a node of the test's own, for each kind of queue, in JSON. The tests' names
/// begin with `own_node_`: by that `.config/nextest.toml` limits how many run at once.
#[macro_export]
macro_rules! on_own_nodes {
    ($($(#[$attribute:meta])* $body:ident),+ $(,)?) => { $(
        mod $body {
            $crate::test_over!(run_on_own_node, own_node_quorum, Quorum, Json, $body, $(#[$attribute])*);
            $crate::test_over!(run_on_own_node, own_node_classic, Classic, Json, $body, $(#[$attribute])*);
        }
    )+ };
}

/// The same where the kind of queue makes no difference.
#[macro_export]
macro_rules! on_own_node {
    ($($(#[$attribute:meta])* $body:ident),+ $(,)?) => { $(
        mod $body {
            $crate::test_over!(run_on_own_node, own_node_quorum, Quorum, Json, $body, $(#[$attribute])*);
        }
    )+ };
}

#[doc(hidden)]
#[macro_export]
macro_rules! test_over {
    ($run:ident, $name:ident, $queue:ident, $encoding:ident, $body:ident, $(#[$attribute:meta])*) => {
        $(#[$attribute])*
        #[test]
        fn $name() -> Result<(), $crate::setup::Failed> {
            let setup =
                $crate::setup::Setup::new($crate::setup::Queue::$queue, vramq_schemas::Encoding::$encoding);
            Ok($crate::test_env::$run(setup, super::$body)?)
        }
    };
}
