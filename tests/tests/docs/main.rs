//! What the documents, the help texts and the shipped configurations say, run as it is written.

mod clients;
mod help;
mod walkthrough;
