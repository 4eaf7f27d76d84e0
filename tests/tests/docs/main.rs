//! Runs the commands and programs of the documents, the help texts and the shipped configurations as they are written.

mod clients;
mod first_job;
mod flags;
mod help;
mod model_tests;
mod readme;
mod schemas;
mod walkthrough;
