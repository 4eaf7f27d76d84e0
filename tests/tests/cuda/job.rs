//! The main job on an emulated GPU: texts in, the vectors of the independent reference out, through a real worker and broker.

use anyhow::{Result, ensure};
use vramq_schemas::{Output, ReplyKind};
use vramq_tests::bert::{fixture, reference};
use vramq_tests::fake_cuda::{gpu, library_path, nvml};
use vramq_tests::job::Message;
use vramq_tests::on_one_setup;
use vramq_tests::test_env::{REPLIES, TestEnv};

on_one_setup!(texts_become_the_references_vectors);

const MODEL: &str = "tiny";
const FIXTURE: &str = "tiny-mean";

async fn texts_become_the_references_vectors(env: &mut TestEnv) -> Result<()> {
    env.set_environment("LD_LIBRARY_PATH", library_path(&[gpu()?, nvml()?])?);
    env.set_environment("FAKE_CUDA_POISON", "1");
    let path = format!("model.{MODEL}.path={}", fixture(FIXTURE));
    let kernels = tempfile::tempdir()?;
    let kernels = format!("device.cuda.kernels={}", kernels.path().display());
    let settings = [&path, "device.kind=cuda", "device.cuda.reserve_mib=0", &kernels];
    let worker = env.spawn_bare_worker(&settings)?;
    worker.consuming().await?;
    let (texts, expected) = reference(FIXTURE)?;
    let job = Message::texts(env.setup.encoding, MODEL, "all", REPLIES, texts)?;
    env.client.publish(MODEL, job).await?;
    let mut replies = env.replies().await?;
    let mut seen = 0;
    loop {
        let reply = replies.next().await?;
        let first = reply.reply()?.offset as usize;
        for (at, output) in reply.outputs()?.outputs.into_iter().enumerate() {
            let Output::Embedding(vector) = output else { anyhow::bail!("{output:?} is no embedding") };
            near(&expected[first + at], &vector.values.to_f32())?;
            seen += 1;
        }
        if reply.kind()? == ReplyKind::Done {
            break;
        }
    }
    ensure!(seen == expected.len(), "{seen} vectors for {} texts", expected.len());
    Ok(())
}

/// As near as f16 is.
fn near(expected: &[f32], found: &[f32]) -> Result<()> {
    ensure!(found.len() == expected.len(), "{} numbers", found.len());
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    let cosine = dot(expected, found) / (dot(expected, expected) * dot(found, found)).sqrt();
    ensure!(cosine >= 0.9999, "cosine {cosine}");
    Ok(())
}
