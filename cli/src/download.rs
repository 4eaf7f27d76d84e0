//! `vramq download`: fetches the bytes of a reference in a reply, and writes them to a file.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use url::Url;
use uuid::Uuid;
use vramq_producer::CloudOptions;
use vramq_producer::download::{Access, DownloadError, download};

use crate::output::text::safe;
use crate::signals::Signals;
use crate::{duration, exit};

/// Download a large output, by the reference `{"uri": …}` in a reply.
///
/// Reads references of file:, http:, https:, s3:, gs: and az:, and compares the bytes with the sha256 in the reference. Object
/// stores are read with the credentials of the environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS,
/// AZURE_STORAGE_ACCOUNT_KEY, …).
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq download 's3://jobs/out/3f0a…-0#sha256=9f86…&type=image/png' -o thumb.png
  vramq download 'file:///srv/out/3f0a…-0#sha256=9f86…' | jq .

Exit codes:
  0 downloaded · 1 the bytes cannot be read, or do not have the reference's digest · 2 usage, or no reference
  130 interrupted (SIGINT) · 143 terminated (SIGTERM)")]
pub(crate) struct Args {
    /// The reference, including the part after `#`.
    #[arg(value_name = "REFERENCE")]
    reference: String,
    /// Where the bytes are written. `-` is standard output; it, a pipe and a device get the bytes before their sha256 is known. A
    /// file gets its name when it is complete and its sha256 is right.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The most MiB that are downloaded.
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_mib: u32,
    /// The time limit of the download.
    #[arg(long, default_value = "10m", value_parser = duration::parse, value_name = "TIME")]
    timeout: Duration,
    /// Connect to private addresses, too (http and https).
    #[arg(long)]
    private: bool,
    /// Another server with the cloud's protocol, such as http://minio:9000.
    #[arg(long, value_name = "URL")]
    endpoint: Option<Url>,
    /// The bucket's region (s3).
    #[arg(long)]
    region: Option<String>,
    /// The storage account (az).
    #[arg(long)]
    account: Option<String>,
    /// The bucket is public: send no credentials.
    #[arg(long)]
    anonymous: bool,
}

/// Runs the command; its exit code.
pub(crate) async fn run(args: Args) -> u8 {
    let mut signals = match Signals::new() {
        Ok(signals) => signals,
        Err(error) => {
            eprintln!("error: listen for signals: {error}");
            return exit::FAILED;
        }
    };
    let is_private = args.private;
    let partial = args.output.as_deref().map(partial_name);
    let downloading = tokio::task::spawn_blocking({
        let partial = partial.clone();
        move || write(args, partial)
    });
    let downloaded = tokio::select! {
        downloaded = downloading => downloaded,
        (code, _) = signals.next() => {
            // The thread goes on until the process ends. Best effort: there is no such file for a pipe.
            let _ = partial.map(fs::remove_file);
            return code;
        }
    };
    let error = match downloaded {
        Ok(Ok(())) => return exit::DONE,
        Ok(Err(error)) => error,
        Err(error) => DownloadError::Write(io::Error::other(error)),
    };
    let code = match &error {
        DownloadError::Write(error) if error.kind() == io::ErrorKind::BrokenPipe => return exit::BROKEN_PIPE,
        DownloadError::Invalid(_) => exit::USAGE,
        _ => exit::FAILED,
    };
    // The library's message names an option of stores, so the command names its own flag.
    let is_refused = matches!(&error, DownloadError::Denied(why) if why.contains("private address"));
    let hint = if is_refused && !is_private { "; --private allows it" } else { "" };
    eprintln!("error: {}{hint}", safe(&error.to_string()));
    code
}

/// The name of an output until it is complete: a unique one, so that no other file or download has it.
fn partial_name(output: &Path) -> PathBuf {
    let mut partial = output.as_os_str().to_owned();
    partial.push(format!(".{}.partial", Uuid::new_v4().simple()));
    partial.into()
}

fn write(args: Args, partial: Option<PathBuf>) -> Result<(), DownloadError> {
    let Args { reference, output, max_mib, timeout, private, endpoint, region, account, anonymous } = args;
    let cloud = CloudOptions {
        endpoint,
        region,
        account,
        is_anonymous: anonymous,
        timeout,
        ..CloudOptions::default()
    };
    let access = Access { bytes_max: u64::from(max_mib) << 20, is_private: private, cloud };
    let output = output.filter(|path| path != Path::new("-"));
    let Some((path, partial)) = output.zip(partial) else {
        return download(&reference, &access, &mut io::stdout().lock()).map(drop);
    };
    // A pipe or a device must not be replaced by a file.
    if fs::metadata(&path).is_ok_and(|existing| !existing.is_file() && !existing.is_dir()) {
        let pipe = File::options().write(true).open(&path).map_err(DownloadError::Write)?;
        return to_file(&reference, &access, pipe);
    }
    let file = File::create_new(&partial).map_err(DownloadError::Write)?;
    let written = to_file(&reference, &access, file)
        .and_then(|()| fs::rename(&partial, &path).map_err(DownloadError::Write));
    if written.is_err() {
        // Best effort: it may not even be there.
        let _ = fs::remove_file(&partial);
    }
    written
}

fn to_file(reference: &str, access: &Access, file: File) -> Result<(), DownloadError> {
    let mut file = BufWriter::new(file);
    download(reference, access, &mut file)?;
    file.flush().map_err(DownloadError::Write)
}
