//! `vramq-bench`: vramq against named references, in the same run on the same machine.
//!
//! Absolute figures change with the machine; only the ratios within one run are meaningful.

mod bare;
mod celery;
mod encoder;
mod end_to_end;
mod engines;
mod gates;
mod http;
mod join;
mod memory;
mod pass_overhead;
mod path;
mod process;
mod programs;
mod refused;
mod report;
mod share;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use end_to_end::Load;
use report::{EndToEnd, Report};
use vramq_inference::engine::encoder::ComputeType;

/// About as long as the reply to an echoed job.
const BARE_REPLY: &[u8] = &[b'x'; 1024];

#[derive(Debug, Parser)]
#[command(name = "vramq-bench")]
struct Cli {
    #[command(subcommand)]
    part: Option<Part>,
    #[command(flatten)]
    setup: Setup,
}

/// What is measured, and with what.
#[derive(Clone, Debug, Args)]
struct Setup {
    #[arg(long, env = "VRAMQ_TEST_AMQP_URL", default_value = "", global = true)]
    url: String,
    /// The broker's management API, with a user who may add users: http://USER:PASSWORD@HOST:PORT.
    #[arg(long, env = "VRAMQ_TEST_MANAGEMENT_URL", global = true)]
    management: Option<String>,
    #[arg(long, default_value = "target/release/vramq-worker", global = true)]
    worker: PathBuf,
    #[arg(long, default_value = "target/release/vramq-gateway", global = true)]
    gateway: PathBuf,
    #[arg(long, env = "VRAMQ_TEST_MODEL", default_value = "models/all-MiniLM-L6-v2", global = true)]
    model: PathBuf,
    /// One text a line.
    #[arg(long, default_value = "models/corpus/passages.txt", global = true)]
    texts: PathBuf,
    #[arg(long, default_value_t = 2_000, global = true)]
    sentences: usize,
    #[arg(long, default_value_t = 2, global = true)]
    threads: usize,
    #[arg(long, default_value_t = 2_048, global = true)]
    pass_tokens: usize,
    /// Jobs of the message path.
    #[arg(long, default_value_t = 20_000, global = true)]
    jobs: usize,
    /// Each figure is the median of this many.
    #[arg(long, default_value_t = 3, global = true)]
    rounds: usize,
    /// A Python with bench/peers/requirements.txt; without it the libraries are left out.
    #[arg(long, env = "VRAMQ_BENCH_PYTHON", global = true)]
    python: Option<PathBuf>,
    /// Libraries that are left out, such as `openvino,openvino-bf16`: one that does not run would end the part `encoder`.
    #[arg(long, value_name = "ENGINE,...", value_delimiter = ',', global = true)]
    without: Vec<String>,
    /// Where the figures go as JSON.
    #[arg(long, default_value = "target/bench/bench.json", global = true)]
    out: PathBuf,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// The encoder against sentence-transformers, ONNX Runtime and OpenVINO, with the accuracy beside the speed.
    Encoder,
    /// The message path with a model that does nothing, against a bare pipelined loop and Celery.
    Path,
    /// Texts through RabbitMQ, against the encoder alone.
    EndToEnd,
    /// How workers share a backlog, and how long small jobs wait beside a bulk load, and beside a full reply queue.
    Share,
    /// Requests through gateway, RabbitMQ and worker, against the encoder behind a bare HTTP handler.
    Http,
    /// Models in processes: what a pass through one costs; PyTorch behind vramq, Celery and LitServe.
    Programs,
    /// The part of `programs` that needs no broker: microseconds of a pass through a program that does nothing.
    PassOverhead,
    /// What running out of memory costs, against other ways to deal with it.
    Memory,
    /// The reference that halves in place, as its own process.
    #[command(hide = true)]
    Halving {
        #[arg(long)]
        queue: String,
    },
    /// One run of the encoder, as its own process.
    #[command(hide = true)]
    Encode {
        /// Where the vectors go.
        #[arg(long)]
        vectors: PathBuf,
        #[arg(long, default_value_t = ComputeType::Auto)]
        dtype: ComputeType,
    },
    /// The bare HTTP handler, as its own process.
    #[command(hide = true)]
    BareHttp {
        #[arg(long)]
        listen: String,
    },
    /// The bare loop, as its own process.
    #[command(hide = true)]
    Bare {
        #[arg(long)]
        queue: String,
        #[arg(long)]
        prefetch: u16,
    },
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let Cli { part, setup } = Cli::parse();
    let mut report = Report::default();
    match part {
        Some(Part::Encode { vectors, dtype }) => {
            let figures = encoder::run(&setup, &texts(&setup)?, dtype, &vectors)?;
            println!("{}", serde_json::to_string(&figures)?);
            return Ok(());
        }
        Some(Part::Bare { queue, prefetch }) => {
            return bare::serve(&setup.url, &queue, prefetch, BARE_REPLY).await;
        }
        Some(Part::Halving { queue }) => {
            return memory::halve(&setup.url, &queue, &setup.model, setup.threads).await;
        }
        Some(Part::Share) => measure_share(&setup, &mut report).await?,
        Some(Part::BareHttp { listen }) => {
            return http::bare(&setup.model, setup.threads, &listen).await;
        }
        Some(Part::Http) => measure_http(&setup, &mut report).await?,
        Some(Part::Programs) => measure_programs(&setup, &mut report).await?,
        Some(Part::PassOverhead) => measure_pass_overhead(&setup, &mut report).await?,
        Some(Part::Memory) => measure_memory(&setup, &mut report).await?,
        Some(Part::Encoder) => measure_encoder(&setup, &mut report).await?,
        Some(Part::Path) => measure_path(&setup, &mut report).await?,
        Some(Part::EndToEnd) => measure_end_to_end(&setup, &mut report).await?,
        None => {
            measure_encoder(&setup, &mut report).await?;
            measure_end_to_end(&setup, &mut report).await?;
            measure_http(&setup, &mut report).await?;
            measure_path(&setup, &mut report).await?;
            measure_share(&setup, &mut report).await?;
            measure_programs(&setup, &mut report).await?;
            measure_memory(&setup, &mut report).await?;
        }
    }
    report.write(&setup.out)
}

async fn measure_encoder(setup: &Setup, report: &mut Report) -> anyhow::Result<()> {
    let count = texts(setup)?.len();
    println!("encoder alone: {count} sentences, {} threads, tokenising included", setup.threads);
    report.encoder = encoder::measure(setup).await?;
    for row in &report.encoder {
        println!("{row}");
    }
    Ok(())
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

async fn measure_end_to_end(setup: &Setup, report: &mut Report) -> anyhow::Result<()> {
    need_broker(setup)?;
    let texts = texts(setup)?;
    println!("end to end: {} sentences through RabbitMQ in jobs of 32", texts.len());
    let (mut alone, mut through) = (Vec::new(), Vec::new());
    for _ in 0..setup.rounds {
        alone.push(encoder::run_engine(setup, "vramq").await?.sentences_per_s);
        through.push(end_to_end::run(&load(setup, &texts), None).await?);
    }
    let (alone, through) = (middle(alone), middle(through));
    let ratio = through / alone;
    println!("  encoder alone {alone:.1}/s  through RabbitMQ {through:.1}/s  ratio {ratio:.3}");
    report.end_to_end = Some(EndToEnd { alone, through, ratio });
    Ok(())
}

async fn measure_http(setup: &Setup, report: &mut Report) -> anyhow::Result<()> {
    need_broker(setup)?;
    let texts = texts(setup)?;
    println!("over HTTP: gateway, RabbitMQ and worker, against the same encoder behind a bare handler");
    let litserve = match &setup.python {
        Some(python) => Some(programs::peer(setup, python, "litserve_minilm.py")?),
        None => None,
    };
    report.http = http::run(&load(setup, &texts), &setup.gateway, setup.rounds, litserve).await?;
    Ok(())
}

async fn measure_programs(setup: &Setup, report: &mut Report) -> anyhow::Result<()> {
    need_broker(setup)?;
    measure_pass_overhead(setup, report).await?;
    report.programs = programs::measure(setup, &texts(setup)?).await?;
    Ok(())
}

async fn measure_pass_overhead(setup: &Setup, report: &mut Report) -> anyhow::Result<()> {
    report.pass_overhead = pass_overhead::measure(setup, &texts(setup)?).await?;
    Ok(())
}

fn load<'a>(setup: &'a Setup, texts: &'a [String]) -> Load<'a> {
    let Setup { url, worker, model, threads, pass_tokens, .. } = setup;
    let (threads, pass_tokens) = (*threads, *pass_tokens);
    Load { url, worker, model, texts, threads, pass_tokens, hint: None, settings: &[] }
}

async fn measure_share(setup: &Setup, report: &mut Report) -> anyhow::Result<()> {
    need_broker(setup)?;
    let texts = texts(setup)?;
    let cores = std::thread::available_parallelism()?;
    println!(
        "share: a backlog of {} texts, workers of one thread, {cores} cores (the broker's, too)",
        texts.len()
    );
    let Setup { url, worker, model, pass_tokens, .. } = setup;
    let of_share = share::Setup { url, worker, model, texts: &texts, pass_tokens: *pass_tokens };
    report.share = share::throughput(&of_share).await?;
    match &setup.python {
        Some(python) => report.share.extend(share::beside_the_cpu(&of_share, python).await?),
        None => println!("  (no VRAMQ_BENCH_PYTHON: workers whose devices leave the CPU alone are left out)"),
    }
    report.join = join::run(&of_share).await?;
    report.latency = share::latencies(&of_share).await?;
    match &setup.management {
        Some(management) => report.refused = refused::run(&of_share, management).await?,
        None => println!(
            "  (no VRAMQ_TEST_MANAGEMENT_URL: a caller beside one whose reply queue is full is left out)"
        ),
    }
    Ok(())
}

async fn measure_memory(setup: &Setup, report: &mut Report) -> anyhow::Result<()> {
    need_broker(setup)?;
    let texts = memory::skewed(&texts(setup)?);
    println!(
        "running out of memory: {} texts of skewed lengths, passes of {} tokens, of which {} MiB have room",
        texts.len(),
        setup.pass_tokens,
        memory::LIMIT_BYTES >> 20
    );
    report.memory = memory::run(&load(setup, &texts), setup.rounds).await?;
    for memory::Row { policy, sentences_per_s, ratio } in &report.memory {
        println!("  {policy:<34} {sentences_per_s:>7.1} sentences/s  {ratio:.2} of the oracle");
    }
    report.again = memory::again(&setup.url, &setup.worker).await?;
    for memory::Again { queue_type, idle_ms, overtaken_by, backlog } in &report.again {
        println!(
            "  {queue_type:<8} an out-of-memory adds {idle_ms:.1} ms on an idle worker; of a backlog of {backlog}, \
             {overtaken_by} are answered before the job that went back"
        );
    }
    Ok(())
}

async fn measure_path(setup: &Setup, report: &mut Report) -> anyhow::Result<()> {
    need_broker(setup)?;
    println!(
        "message path: {} jobs of 1 KiB, persistent, no-op model, drained from a full queue",
        setup.jobs
    );
    report.path = path::run(&setup.url, &setup.worker, setup.jobs, setup.rounds).await?;
    let Some(python) = &setup.python else {
        println!("  (no VRAMQ_BENCH_PYTHON: Celery is left out)");
        return Ok(());
    };
    let cores = std::thread::available_parallelism()?.get();
    report.celery = celery::run(&setup.url, python, setup.jobs / 4, cores, setup.rounds).await?;
    for row in &report.celery {
        println!("{row}");
    }
    let best = celery::Best::of(&report.celery);
    for row in report.path.iter().filter(|row| row.queue_type == "classic") {
        let (prefetch, ours) = (row.prefetch, row.worker.jobs_per_s);
        println!(
            "  classic  prefetch {prefetch:<4} vramq is {:.1}x Celery's best round with persistent messages, {:.1}x its best of all",
            ours / best.persistent,
            ours / best.any
        );
    }
    Ok(())
}

fn need_broker(setup: &Setup) -> anyhow::Result<()> {
    anyhow::ensure!(!setup.url.is_empty(), "no broker: run `make bench`, or set VRAMQ_TEST_AMQP_URL");
    Ok(())
}

fn texts(setup: &Setup) -> anyhow::Result<Vec<String>> {
    let text = std::fs::read_to_string(&setup.texts).with_context(|| setup.texts.display().to_string())?;
    Ok(text.lines().take(setup.sentences).map(str::to_owned).collect())
}
