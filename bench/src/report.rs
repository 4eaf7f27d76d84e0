//! What `vramq-bench` has measured, and the file that scripts/plots draws.

use std::path::Path;

use anyhow::Context as _;
use serde::Serialize;

use crate::{celery, encoder, http, join, memory, pass_overhead, path, programs, refused, share};

/// Everything that was measured.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    pub encoder: Vec<encoder::Row>,
    pub path: Vec<path::Row>,
    pub celery: Vec<celery::Row>,
    pub end_to_end: Option<EndToEnd>,
    pub share: Vec<share::Row>,
    pub latency: Vec<share::Latency>,
    pub join: Vec<join::Row>,
    pub refused: Vec<refused::Row>,
    pub http: Vec<http::Row>,
    pub programs: Vec<programs::Row>,
    pub pass_overhead: Vec<pass_overhead::Row>,
    pub memory: Vec<memory::Row>,
    pub again: Vec<memory::Again>,
}

/// Sentences per second.
#[derive(Debug, Serialize)]
pub struct EndToEnd {
    pub alone: f64,
    pub through: f64,
    pub ratio: f64,
}

impl Report {
    /// Writes it as JSON.
    pub fn write(&self, out: &Path) -> anyhow::Result<()> {
        if let Some(folder) = out.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(out, serde_json::to_vec_pretty(self)?).with_context(|| out.display().to_string())?;
        println!("figures: {}", out.display());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// scripts/plots knows a report by the names of its fields.
    #[test]
    fn a_report_is_drawn() -> anyhow::Result<()> {
        let figures = encoder::Figures { sentences_per_s: 178.8, tokens_per_s: 11_390.0, peak_mib: 128.0 };
        let served = |texts_per_s| http::Served { texts_per_s, p50_ms: 1.0, p95_ms: 2.0 };
        let speed = |jobs_per_s| path::Speed { jobs_per_s, cpu_us_per_job: 50.0 };
        let report = Report {
            encoder: vec![encoder::Row {
                engine: "vramq".to_owned(),
                figures,
                vramq_is: 1.0,
                cosine_min: None,
            }],
            http: vec![http::Row {
                clients: 16,
                texts: 1,
                gateway: served(155.4),
                bare: served(122.5),
                ratio: 1.27,
                litserve: None,
            }],
            path: vec![path::Row {
                queue_type: "classic",
                prefetch: 64,
                bare: speed(5_908.0),
                worker: speed(6_660.0),
                ratio: 1.13,
            }],
            memory: vec![memory::Row { policy: "vramq, learning it", sentences_per_s: 193.6, ratio: 1.0 }],
            ..Report::default()
        };
        let folder = std::env::temp_dir().join(format!("vramq-bench-{}", std::process::id()));
        let file = folder.join("bench.json");
        report.write(&file)?;
        let plots = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/plots");
        let drawn = std::process::Command::new(plots).args([&file, &folder]).status()?;
        assert!(drawn.success());
        for (name, figure) in
            [("encoder", "178.8"), ("http", "155.4"), ("path", "6,660"), ("memory", "193.6")]
        {
            let picture = std::fs::read_to_string(folder.join(format!("bench-{name}.svg")))?;
            assert!(picture.contains(&format!(">{figure}</text>")), "{picture}");
        }
        std::fs::remove_dir_all(&folder)?;
        Ok(())
    }
}
