//! Reads a client's credentials from files: a certificate with its key, or a password. Each connection reads them again, so that you can
//! replace the files while a program runs.

use std::io;
use std::path::{Path, PathBuf};

use lapin::tcp::OwnedIdentity;

/// The largest file: a certificate with a chain behind it has a few KiB. Bounds what a wrong path makes a program read.
const FILE_BYTES_MAX: u64 = 64 * 1024;

/// The files with a client's credentials. The URL says what they leave out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Credentials {
    /// The client's certificate in PEM, and those between it and its authority.
    pub certificate: Option<PathBuf>,
    /// Its private key in PEM, without a passphrase.
    pub key: Option<PathBuf>,
    /// The password of the URL's user.
    pub password_file: Option<PathBuf>,
}

/// What is wrong with a field of [`Credentials`]. Never contains a file's content.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {what}")]
pub struct InvalidCredentials {
    /// As configurations name it, in the table of the broker.
    pub field: &'static str,
    pub what: String,
    /// Whether this fault is that the file does not exist: the configuration may be for another machine.
    pub is_absent: bool,
}

/// What a URL says that credentials must suit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OfUrl {
    pub(crate) is_tls: bool,
    pub(crate) names_user: bool,
    pub(crate) has_password: bool,
    /// Whether the certificate names the user (`auth_mechanism=external`).
    pub(crate) is_external: bool,
}

/// What the files say.
#[derive(Default)]
pub(crate) struct Secrets {
    pub(crate) identity: Option<OwnedIdentity>,
    pub(crate) password: Option<String>,
}

impl Credentials {
    /// All that is wrong with them beside a URL, including files that cannot be read now.
    pub(crate) fn faults(&self, url: OfUrl) -> Vec<InvalidCredentials> {
        let mut faults = Vec::new();
        let mut fault = |field, what: &str| {
            faults.push(InvalidCredentials { field, what: what.to_owned(), is_absent: false });
        };
        match (&self.certificate, &self.key) {
            (Some(_), None) => fault("key", "is missing: the certificate needs its private key"),
            (None, Some(_)) => fault("certificate", "is missing: the private key needs its certificate"),
            (Some(_), Some(_)) if !url.is_tls => {
                fault("certificate", "has no effect without an amqps:// URL");
            }
            _ => {}
        }
        if self.password_file.is_some() {
            if url.is_external {
                fault("password_file", "has no effect where the certificate says who the client is");
            } else if url.has_password {
                fault("password_file", "is a second password: the URL has one as well");
            } else if !url.names_user {
                fault("password_file", "needs the name of its user in the URL: amqp://USER@HOST/VHOST");
            }
        }
        let files = [
            self.certificate.as_ref().map(|file| ("certificate", certificate(file).err())),
            self.key.as_ref().map(|file| ("key", key(file).err())),
            self.password_file.as_ref().map(|file| ("password_file", password(file).err())),
        ];
        for (field, error) in files.into_iter().flatten() {
            faults.extend(error.map(|error| InvalidCredentials {
                field,
                what: format!("is {error}"),
                is_absent: error.kind() == io::ErrorKind::NotFound,
            }));
        }
        faults
    }

    /// Reads the files on a blocking thread, because a folder may be mounted over a network.
    ///
    /// # Errors
    /// One cannot be read, or holds something else.
    pub(crate) async fn read(&self) -> io::Result<Secrets> {
        if *self == Self::default() {
            return Ok(Secrets::default());
        }
        let files = self.clone();
        tokio::task::spawn_blocking(move || files.read_now()).await.map_err(io::Error::other)?
    }

    fn read_now(&self) -> io::Result<Secrets> {
        let identity = match (&self.certificate, &self.key) {
            (Some(chain), Some(private)) => {
                Some(OwnedIdentity::PKCS8 { pem: certificate(chain)?.into(), key: key(private)?.into() })
            }
            _ => None,
        };
        Ok(Secrets { identity, password: self.password_file.as_deref().map(password).transpose()? })
    }

    /// The secret files that every user of this machine may read.
    pub fn exposed(&self) -> impl Iterator<Item = &Path> {
        let secret = self.key.iter().chain(&self.password_file).map(PathBuf::as_path);
        secret.filter(|file| is_exposed(file))
    }
}

#[cfg(unix)]
fn is_exposed(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    /// "Others may read", of a file's mode.
    const OTHERS_READ: u32 = 0o004;
    std::fs::metadata(file).is_ok_and(|metadata| metadata.permissions().mode() & OTHERS_READ != 0)
}

#[cfg(not(unix))]
fn is_exposed(_file: &Path) -> bool {
    false
}

fn certificate(file: &Path) -> io::Result<String> {
    let pem = text(file)?;
    if pem.contains("-----BEGIN CERTIFICATE-----") {
        Ok(pem)
    } else {
        wrong(file, "holds no certificate in PEM")
    }
}

fn key(file: &Path) -> io::Result<String> {
    let pem = text(file)?;
    if pem.contains("ENCRYPTED") {
        wrong(file, "holds a key with a passphrase, which is not supported")
    } else if pem.contains("PRIVATE KEY-----") {
        Ok(pem)
    } else {
        wrong(file, "holds no private key in PEM")
    }
}

/// Without the line end that editors leave behind it.
fn password(file: &Path) -> io::Result<String> {
    let password = text(file)?.trim_end_matches(['\r', '\n']).to_owned();
    if password.is_empty() { wrong(file, "is empty") } else { Ok(password) }
}

fn text(file: &Path) -> io::Result<String> {
    let unreadable = |error: io::Error| {
        io::Error::new(error.kind(), format!("{}, which cannot be read: {error}", file.display()))
    };
    let metadata = std::fs::metadata(file).map_err(unreadable)?;
    if !metadata.is_file() {
        // Opening a pipe would wait for its writer, and a connection that comes later would find it empty.
        return wrong(file, "is no regular file");
    }
    if metadata.len() > FILE_BYTES_MAX {
        return wrong(file, "is larger than 64 KiB");
    }
    std::fs::read_to_string(file).map_err(unreadable)
}

fn wrong(file: &Path, what: &str) -> io::Result<String> {
    Err(io::Error::new(io::ErrorKind::InvalidData, format!("{}, which {what}", file.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nMII=\n-----END CERTIFICATE-----\n";
    const KEY: &str = "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----\n";
    const URL: OfUrl = OfUrl { is_tls: true, names_user: true, has_password: false, is_external: false };

    fn file(folder: &tempfile::TempDir, name: &str, text: &str) -> Option<PathBuf> {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        Some(path)
    }

    fn faults(credentials: &Credentials, url: OfUrl) -> Vec<&'static str> {
        let faults = credentials.faults(url);
        assert!(faults.iter().all(|fault| !fault.to_string().contains("hunter2")), "{faults:?}");
        faults.into_iter().map(|fault| fault.field).collect()
    }

    #[test]
    fn all_faulty_combinations_of_credentials_are_reported_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let certificate = file(&folder, "client.pem", CERTIFICATE);
        let key = file(&folder, "client.key", KEY);
        let password_file = file(&folder, "password", "hunter2\n");
        let all = Credentials { certificate, key, password_file };
        assert_eq!(faults(&all, URL), [""; 0]);
        assert_eq!(faults(&Credentials::default(), URL), [""; 0]);
        for (credentials, url, expected) in [
            (Credentials { key: None, ..all.clone() }, URL, &["key"][..]),
            (Credentials { certificate: None, ..all.clone() }, URL, &["certificate"]),
            (all.clone(), OfUrl { is_tls: false, ..URL }, &["certificate"]),
            (all.clone(), OfUrl { is_external: true, ..URL }, &["password_file"]),
            (all.clone(), OfUrl { has_password: true, ..URL }, &["password_file"]),
            (all.clone(), OfUrl { names_user: false, ..URL }, &["password_file"]),
            (
                all.clone(),
                OfUrl { is_tls: false, has_password: true, ..URL },
                &["certificate", "password_file"],
            ),
        ] {
            assert_eq!(faults(&credentials, url), expected, "{credentials:?} {url:?}");
        }
    }

    #[test]
    fn a_file_that_is_missing_or_holds_something_else_is_a_fault() {
        let folder = tempfile::tempdir().unwrap();
        let certificate = file(&folder, "client.pem", CERTIFICATE);
        let key = file(&folder, "client.key", KEY);
        let large = file(&folder, "large", &"x".repeat(1 << 17));
        let encrypted = file(&folder, "encrypted", "-----BEGIN ENCRYPTED PRIVATE KEY-----\n");
        let (empty, nowhere) = (file(&folder, "empty", "\n"), Some(folder.path().join("nowhere")));
        let of =
            |certificate: &Option<PathBuf>, key: &Option<PathBuf>, password: &Option<PathBuf>| Credentials {
                certificate: certificate.clone(),
                key: key.clone(),
                password_file: password.clone(),
            };
        for (credentials, field) in [
            (of(&nowhere, &key, &None), "certificate"),
            (of(&key, &key, &None), "certificate"),
            (of(&certificate, &certificate, &None), "key"),
            (of(&certificate, &encrypted, &None), "key"),
            (of(&None, &None, &empty), "password_file"),
            (of(&None, &None, &large), "password_file"),
            (of(&None, &None, &nowhere), "password_file"),
            (of(&None, &None, &Some(folder.path().to_owned())), "password_file"),
        ] {
            assert_eq!(faults(&credentials, URL), [field], "{credentials:?}");
        }
    }

    #[tokio::test]
    async fn changed_files_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let password_file = file(&folder, "password", "one\r\n");
        let credentials = Credentials { password_file, ..Credentials::default() };
        let password = async || credentials.read().await.unwrap().password;
        assert_eq!(password().await.as_deref(), Some("one"));
        file(&folder, "password", " two with spaces ");
        assert_eq!(password().await.as_deref(), Some(" two with spaces "));
        std::fs::remove_file(folder.path().join("password")).unwrap();
        assert!(credentials.read().await.is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_key_that_others_may_read_is_reported_and_a_certificate_is_not() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let certificate = file(&folder, "client.pem", CERTIFICATE);
        let key = file(&folder, "client.key", KEY);
        let credentials = Credentials { certificate, key: key.clone(), password_file: None };
        for (mode, exposed) in [(0o644, 1), (0o640, 0), (0o600, 0)] {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(key.as_ref().unwrap(), permissions).unwrap();
            assert_eq!(credentials.exposed().count(), exposed, "{mode:o}");
        }
    }
}
