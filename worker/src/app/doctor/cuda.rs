//! The CUDA part of the report: which libraries were found, where, and the effects of those that are missing.

use std::fmt;
use std::path::Path;

use serde::Serialize;
use vramq_core::units::Mib;

use crate::device::cuda::{self, CudaDevice, Found, Libraries, Missing};

/// The report. Sizes in bytes.
#[derive(Debug, Serialize)]
pub struct CudaReport {
    libraries: Vec<LibraryRow>,
    devices: Vec<DeviceRow>,
    /// Why there are no devices, in words.
    problem: Option<String>,
    /// Bytes of the context of the device in use; `None` if no device is in use, or if they cannot be measured.
    context: Option<u64>,
}

#[derive(Debug, Serialize)]
struct LibraryRow {
    name: &'static str,
    path: Option<String>,
    /// What is missing and what follows from it, as text.
    missing: Option<String>,
}

#[derive(Debug, Serialize)]
struct DeviceRow {
    name: String,
    product: String,
    uuid: String,
    total: u64,
}

impl From<Found> for DeviceRow {
    fn from(Found { name, product, uuid, total, .. }: Found) -> Self {
        Self { name, product, uuid, total }
    }
}

impl LibraryRow {
    fn new(name: &'static str, found: Result<&Path, &Missing>, without: &str) -> Self {
        Self {
            name,
            path: found.ok().map(|path| path.display().to_string()),
            missing: found.err().map(|missing| format!("{missing}: {without}")),
        }
    }
}

impl CudaReport {
    /// Looks at the machine; `device` is the one in use. Libraries are looked for in `folder` first.
    pub fn new(device: Option<&CudaDevice>, folder: Option<&Path>) -> Self {
        let driver = cuda::find();
        let mut report = Self {
            libraries: Vec::new(),
            devices: Vec::new(),
            problem: None,
            context: device.and_then(CudaDevice::context_cost),
        };
        let driver = match driver {
            Ok(driver) => driver,
            Err(absent) => {
                report.problem = Some(absent.to_string());
                return report;
            }
        };
        let libraries = match device {
            Some(device) => device.libraries().clone(),
            None => Libraries::open(driver.version, folder),
        };
        let path = |found: &Result<cuda::Opened, Missing>| {
            found.as_ref().map(|opened| opened.path.clone()).map_err(Clone::clone)
        };
        let rows = [
            ("libcuda", Ok(driver.library.path.clone()), ""),
            (
                "libnvrtc",
                path(&libraries.nvrtc),
                "kernels come from the PTX in the program, and the driver compiles them",
            ),
            (
                "libcublasLt",
                path(&libraries.cublaslt),
                "the program's own matrix products are used, which are slower",
            ),
            (
                "libnvidia-ml",
                cuda::nvml_path().ok_or(Missing::Nowhere),
                "no telemetry, and what the context takes counts as other processes'",
            ),
        ];
        report.libraries = rows
            .iter()
            .map(|(name, found, without)| LibraryRow::new(name, found.as_deref(), without))
            .collect();
        report.devices = driver.devices.into_iter().map(DeviceRow::from).collect();
        if report.devices.is_empty() {
            report.problem = Some("the driver lists no devices".to_owned());
        }
        report
    }
}

impl fmt::Display for CudaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.libraries.is_empty() {
            writeln!(f, "{:<16} FOUND", "CUDA LIBRARY")?;
            for LibraryRow { name, path, missing } in &self.libraries {
                let found = path.as_deref().or(missing.as_deref()).unwrap_or("not found");
                writeln!(f, "{name:<16} {found}")?;
            }
            writeln!(f)?;
        }
        if !self.devices.is_empty() {
            writeln!(f, "{:<16} {:>14}  {:<44} PRODUCT", "CUDA DEVICE", "TOTAL", "UUID")?;
            for DeviceRow { name, product, uuid, total } in &self.devices {
                writeln!(f, "{name:<16} {:>14}  {uuid:<44} {product}", Mib(*total).to_string())?;
            }
        }
        if let Some(context) = self.context {
            writeln!(f, "\nThe context takes {} of the device.", Mib(context))?;
        }
        match &self.problem {
            Some(problem) => writeln!(f, "CUDA: {problem}"),
            None => Ok(()),
        }
    }
}
