//! An HTTP gateway to vramq workers.
