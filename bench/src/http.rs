//! Measures what the queue costs over HTTP: requests for embeddings through gateway, RabbitMQ and worker, against the same
//! encoder behind a handler that runs each request at once.

use std::fmt;
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{ComputeType, Encoder, Source};
use vramq_inference::engine::{Engine as _, Item};
use vramq_schemas::{Input, Output, Params, Values};

use crate::end_to_end::Load;
use crate::process;

const MODEL: &str = "bench-http";

/// Texts in a request, and callers at a time.
const TEXTS: [usize; 2] = [1, 32];
const CLIENTS: [usize; 3] = [1, 16, 128];

/// About so many texts go through in one measurement, and each client sends at least two requests.
const TEXTS_EACH: usize = 1024;

/// Memory of the bare handler's device: never the limit here.
const DEVICE_BYTES: u64 = 4 << 30;

/// The result of one server under one kind of load.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Served {
    pub texts_per_s: f64,
    pub p50_ms: f64,
    pub p95_ms: f64,
}

/// One kind of load on both servers.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Row {
    pub clients: usize,
    pub texts: usize,
    pub gateway: Served,
    pub bare: Served,
    /// Throughput through the gateway, as a part of the bare handler's.
    pub ratio: f64,
    /// PyTorch behind LitServe.
    pub litserve: Option<Served>,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { clients, texts, gateway, bare, ratio, litserve } = self;
        write!(
            f,
            "  {clients:>3} clients, {texts:>2} texts a request: {gateway}; bare {bare}; ratio {ratio:.2}"
        )?;
        match litserve {
            Some(litserve) => write!(f, "; LitServe {litserve}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { texts_per_s, p50_ms, p95_ms } = self;
        write!(f, "{texts_per_s:>7.1} texts/s, p50 {p50_ms:.1} ms, p95 {p95_ms:.1} ms")
    }
}

/// Measures both servers under each kind of load, in turn. Each figure is the median over the rounds.
/// `litserve` is the command that serves PyTorch, without its port.
pub async fn run(
    load: &Load<'_>,
    gateway: &Path,
    rounds: usize,
    litserve: Option<Command>,
) -> anyhow::Result<Vec<Row>> {
    let Load { url, worker, model, texts, threads, pass_tokens, .. } = *load;
    let settings = [
        format!("model.{MODEL}.path={}", model.display()),
        format!("model.{MODEL}.pass_tokens={pass_tokens}"),
        format!("device.cpu.threads={threads}"),
    ];
    let mut worker = process::spawn_worker(url, worker, &settings)?;
    let (mut door, door_url) = spawn(gateway, &["run", "--broker-url", url, "--log", "error"])?;
    let bench = std::env::current_exe()?;
    let (model, threads) = (model.display().to_string(), threads.to_string());
    let (mut bare, bare_url) = spawn(&bench, &["bare-http", "--model", &model, "--threads", &threads])?;
    let litserve = match litserve {
        Some(command) => Some(LitServe::start(command).await?),
        None => None,
    };
    let mut rows = Vec::new();
    for path in [&door_url, &bare_url] {
        wait_for(&format!("{path}/v1/models/{MODEL}")).await?;
    }
    for texts_each in TEXTS {
        for clients in CLIENTS {
            let (mut through, mut at_once, mut by_peer) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..rounds {
                through.push(ask(&door_url, texts, texts_each, clients).await?);
                at_once.push(ask(&bare_url, texts, texts_each, clients).await?);
                if let Some(litserve) = &litserve {
                    by_peer.push(ask(&litserve.url, texts, texts_each, clients).await?);
                }
            }
            let (gateway, bare) = (median(through), median(at_once));
            let ratio = gateway.texts_per_s / bare.texts_per_s;
            let litserve = (!by_peer.is_empty()).then(|| median(by_peer));
            let row = Row { clients, texts: texts_each, gateway, bare, ratio, litserve };
            println!("{row}");
            rows.push(row);
        }
    }
    for child in [&mut door, &mut worker, &mut bare] {
        process::stop(child).await?;
    }
    if let Some(litserve) = litserve {
        litserve.stop().await?;
    }
    Ok(rows)
}

/// PyTorch behind LitServe (bench/peers/litserve_minilm.py), which has several processes.
pub struct LitServe {
    pub url: String,
    group: process::Group,
}

impl LitServe {
    /// Starts it on a free port and waits until it answers.
    pub async fn start(mut command: Command) -> anyhow::Result<Self> {
        let port = process::free_port()?;
        let group = process::Group::start(command.arg(port.to_string()))?;
        let url = format!("http://127.0.0.1:{port}");
        let served = Self { url, group };
        wait_for(&format!("{}/health", served.url)).await?;
        Ok(served)
    }

    /// Ends it and its processes.
    pub async fn stop(self) -> anyhow::Result<()> {
        self.group.stop().await
    }
}

fn median(mut runs: Vec<Served>) -> Served {
    runs.sort_by(|a, b| a.texts_per_s.total_cmp(&b.texts_per_s));
    runs[runs.len() / 2]
}

/// Starts a server on a free port; its URL.
fn spawn(program: &Path, arguments: &[&str]) -> anyhow::Result<(Child, String)> {
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let mut command = Command::new(program);
    command.args(arguments).args(["--listen", &address]).kill_on_drop(true);
    let child = command.spawn().with_context(|| format!("start {}", program.display()))?;
    Ok((child, format!("http://{address}")))
}

/// Waits until a server knows its model.
async fn wait_for(url: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + process::STALLED;
    loop {
        let asked = url.to_owned();
        if tokio::task::spawn_blocking(move || ureq::get(&asked).call().is_ok()).await? {
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < deadline, "no answer at {url}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Sends requests from `clients` clients. Each waits for its answer before it sends its next request.
pub async fn ask(url: &str, texts: &[String], each: usize, clients: usize) -> anyhow::Result<Served> {
    let requests = (TEXTS_EACH / each).max(2 * clients);
    let bodies: Arc<Vec<String>> = Arc::new(
        (0..requests)
            .map(|n| {
                let input: Vec<_> = texts.iter().cycle().skip(n * each % texts.len()).take(each).collect();
                json!({"model": MODEL, "input": input, "encoding_format": "float"}).to_string()
            })
            .collect(),
    );
    let (next, url) = (Arc::new(AtomicUsize::new(0)), format!("{url}/v1/embeddings"));
    let started = Instant::now();
    let callers: Vec<_> = (0..clients)
        .map(|_| {
            let (bodies, next, url) = (Arc::clone(&bodies), Arc::clone(&next), url.clone());
            std::thread::spawn(move || {
                let agent = ureq::AgentBuilder::new().build();
                let mut took = Vec::new();
                while let Some(body) = bodies.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let sent = Instant::now();
                    let request = agent.post(&url).set("content-type", "application/json");
                    let answer: Value = serde_json::from_reader(request.send_string(body)?.into_reader())?;
                    let vectors = answer["data"].as_array().map_or(0, Vec::len);
                    anyhow::ensure!(vectors == each, "{vectors} vectors for {each} texts");
                    took.push(sent.elapsed());
                }
                anyhow::Ok(took)
            })
        })
        .collect();
    let took = tokio::task::spawn_blocking(move || {
        let mut all = Vec::new();
        for caller in callers {
            all.extend(caller.join().map_err(|_| anyhow::anyhow!("a client panicked"))??);
        }
        anyhow::Ok(all)
    });
    let mut took: Vec<Duration> = took.await??;
    let seconds = started.elapsed().as_secs_f64();
    took.sort_unstable();
    let at = |part: f64| took[((took.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e3;
    Ok(Served { texts_per_s: (requests * each) as f64 / seconds, p50_ms: at(0.5), p95_ms: at(0.95) })
}

/// The encoder of the bare handler. Passes run one after the other, as on a worker's device; tokenising is concurrent.
struct Bare {
    engine: Encoder,
    pass: Mutex<()>,
}

#[derive(Debug, Deserialize)]
struct Request {
    input: Vec<String>,
}

/// Serves the encoder until the process is ended.
pub async fn bare(model: &Path, threads: usize, listen: &str) -> anyhow::Result<()> {
    let device = CpuDevice::new(DEVICE_BYTES, threads)?;
    let engine = Encoder::load_dtype(&Source::Folder(model.to_owned()), device, ComputeType::Auto)?;
    let bare = Arc::new(Bare { engine, pass: Mutex::new(()) });
    let known = format!("/v1/models/{MODEL}");
    let router = Router::new()
        .route("/v1/embeddings", post(embed))
        .route(&known, get(|| async { MODEL }))
        .with_state(bare);
    let listener = tokio::net::TcpListener::bind(listen).await?;
    Ok(axum::serve(listener, router).await?)
}

async fn embed(
    State(bare): State<Arc<Bare>>,
    Json(request): Json<Request>,
) -> Result<Json<Value>, (StatusCode, String)> {
    let failed = |error: String| (StatusCode::INTERNAL_SERVER_ERROR, error);
    let vectors = tokio::task::spawn_blocking(move || bare.vectors(request.input)).await;
    let vectors = vectors.map_err(|error| failed(error.to_string()))?.map_err(failed)?;
    let data: Vec<_> = vectors
        .into_iter()
        .enumerate()
        .map(|(index, embedding)| json!({"object": "embedding", "index": index, "embedding": embedding}))
        .collect();
    Ok(Json(json!({"object": "list", "model": MODEL, "data": data, "usage": {"total_tokens": 0}})))
}

impl Bare {
    /// One vector for each text, in their order.
    fn vectors(&self, texts: Vec<String>) -> Result<Vec<Vec<f32>>, String> {
        let inputs: Vec<_> = texts.into_iter().map(Input::Text).collect();
        let items = self.engine.prepare(&inputs, &Params::default()).map_err(|error| format!("{error:?}"))?;
        // The longest item first, as in a worker's pass.
        let mut items: Vec<(usize, Item)> = items.into_iter().enumerate().collect();
        items.sort_by_key(|(_, item)| std::cmp::Reverse(item.cost()));
        let (order, items): (Vec<_>, Vec<_>) = items.into_iter().unzip();
        let outputs = {
            let _pass = self.pass.lock().unwrap_or_else(PoisonError::into_inner);
            self.engine.run(&items).map_err(|error| format!("{error:?}"))?
        };
        let mut vectors = vec![Vec::new(); order.len()];
        for (at, output) in order.into_iter().zip(outputs) {
            let Output::Embedding(embedding) = output else { return Err("no vector".to_owned()) };
            let Values::F32(values) = embedding.values else { return Err("no f32".to_owned()) };
            vectors[at] = values;
        }
        Ok(vectors)
    }
}
