//! Jobs of many items for the echo engine, and their answers put together.

use anyhow::{Result, ensure};
use vramq_schemas::{Output, ReplyKind};

use crate::client::{Mailbox, Received};

/// This many different texts.
pub fn items(count: usize) -> Vec<String> {
    (0..count).map(|at| format!("item {at}")).collect()
}

/// Puts all replies of a job together. Fails unless parts come in order, without gaps and repeats.
///
/// # Errors
/// The job fails, or something is missing, wrong or there twice.
pub async fn answered_once(replies: &mut Mailbox, id: &str, items: &[String]) -> Result<Vec<Received>> {
    let mut outputs = Vec::new();
    let mut all = Vec::new();
    loop {
        let reply = replies.next().await?;
        ensure!(reply.id() == id);
        ensure!(reply.kind()? != ReplyKind::Failed, "failed: {:?}", reply.failure());
        let headers = reply.reply()?;
        ensure!(headers.offset as usize == outputs.len(), "{headers:?} after {} items", outputs.len());
        outputs.extend(reply.outputs()?.outputs);
        let done = reply.kind()? == ReplyKind::Done;
        all.push(reply);
        if done {
            break;
        }
    }
    let expected: Vec<_> = items.iter().map(|item| Output::Json(item.as_str().into())).collect();
    ensure!(outputs == expected, "{} outputs for {} items", outputs.len(), items.len());
    Ok(all)
}
