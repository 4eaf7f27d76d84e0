"""Reads what a reference in a reply stands for: a large output that its worker put into a store.

    picture = vramq.download(result.outputs[0], folder="/srv/out")

Standard library only. The rules are those of `vramq download`, described in docs/stores.md of the project; files are read beneath a
folder that the caller names.
"""

import contextlib
import errno
import hashlib
import http.client
import io
import os
import re
import socket
import ssl
import stat
import threading
import time
import urllib.parse
import uuid

from ._address import is_public
from .errors import DownloadError
from .models import Uri

__all__ = ["download", "download_file"]

# The longest reference, in bytes: presigned URLs have some two thousand.
REFERENCE_BYTES_MAX = 8192
# What a download may have at most, unless the caller says otherwise: as `vramq download`.
BYTES_MAX = 1 << 30
# As `vramq download`: enough for a GiB at 2 MB/s.
TIMEOUT_S = 600.0
# A server that works takes a connection within a round trip; one lost packet is sent again after one second, then two.
CONNECT_S_MAX = 5.0
# What is read at a time.
PIECE_BYTES = 64 * 1024
# The most characters of an error that a server has a part in.
SERVER_TEXT_MAX = 200

# The object stores that workers write to.
_BUCKETS = ("s3", "gs", "az")


def download(reference, *, folder=None, private=False, bytes_max=BYTES_MAX, timeout=TIMEOUT_S, ssl_context=None):
    """The bytes of a reference: a `vramq.Uri` of a result, or its text. Blocks; with asyncio use `asyncio.to_thread`.

    file: is read beneath `folder` only, and no link on the way there is followed. http: and https: connect to public addresses
    only, unless `private` is true, and follow no redirect. `timeout` is in seconds, for the whole answer of a server; looking up
    its name takes as long as the system takes. `ssl_context` replaces the system's certificate authorities. For s3:, gs: and az:
    there is the command `vramq download`.

    The bytes are compared with the sha256 in the reference, if it has one. Raises DownloadError.
    """
    data = io.BytesIO()
    _download(reference, data.write, folder, private, bytes_max, timeout, ssl_context)
    return data.getvalue()


def download_file(reference, path, *, folder=None, private=False, bytes_max=BYTES_MAX, timeout=TIMEOUT_S, ssl_context=None):
    """`download` into a file; returns how many bytes it has. The file gets its name when it is complete and compared.

    Raises DownloadError, or OSError if the file cannot be written.
    """
    path = os.path.abspath(path)
    # A name that no other file has, and that no other download takes.
    partial = f"{path}.{uuid.uuid4().hex}.partial"
    try:
        with open(partial, "xb") as file:
            count = _download(reference, file.write, folder, private, bytes_max, timeout, ssl_context)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return count


def _download(text, write, folder, private, bytes_max, timeout, ssl_context):
    reference = Reference(text)
    if reference.scheme == "file":
        opened = _file(reference, folder)
    elif reference.scheme in ("http", "https"):
        opened = _web(reference, private, timeout, ssl_context)
    elif reference.scheme in _BUCKETS:
        message = f"{reference.shown} is in an object store: `vramq download REFERENCE -o FILE` reads it"
        raise DownloadError("invalid-reference", message)
    else:
        message = f"{reference.shown} begins with {reference.scheme}:, to which no worker writes outputs"
        raise DownloadError("invalid-reference", message)
    with opened as (read, length):
        if length is not None and length > bytes_max:
            raise _too_large(reference, length, bytes_max)
        count, digest = 0, hashlib.sha256()
        while True:
            piece = read(PIECE_BYTES)
            if not piece:
                break
            count += len(piece)
            if count > bytes_max:
                raise _too_large(reference, count, bytes_max)
            digest.update(piece)
            write(piece)
    if reference.sha256 not in (None, digest.hexdigest()):
        message = f"{reference.shown} has the sha256 {digest.hexdigest()}, not {reference.sha256}"
        raise DownloadError("reference-mismatch", message)
    return count


def _too_large(reference, has, most):
    return DownloadError("too-large", f"{reference.shown} has {has} bytes or more, at most {most} are taken")


class Reference:
    """A reference that was read: `URL`, or `URL#sha256=HEX&type=MEDIA_TYPE` with either part.

    Raises DownloadError if the text is not an absolute URL, or one that would lead elsewhere than it says.
    """

    def __init__(self, text):
        text = text.uri if isinstance(text, Uri) else text
        if not isinstance(text, str):
            raise TypeError(f"a reference is a vramq.Uri or a str, not {type(text).__name__}")
        if len(text) > REFERENCE_BYTES_MAX:
            raise _invalid(f"is longer than {REFERENCE_BYTES_MAX} bytes")
        # Those that a URL can have. Parsers disagree about the others.
        if not re.fullmatch(r"[!-\[\]-~]+", text):
            raise _invalid("is not a URL: it has spaces, control characters, backslashes, or characters outside ASCII")
        try:
            url = urllib.parse.urlsplit(text)
            self.host, self.port = url.hostname, url.port
        except ValueError as error:
            raise _invalid(f"is not a URL: {error}") from None
        self.scheme, self.path, self.query = url.scheme, url.path, url.query
        self.sha256 = _digest(url.fragment)
        # For errors and logs: without the query, which may be a signature, and without a user.
        self.shown = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
        is_absolute = url.path.startswith("/") if url.scheme == "file" else url.hostname
        if not url.scheme or not is_absolute:
            raise _invalid("is not an absolute URL")
        if "@" in url.netloc:
            raise _denied(f"{self.shown} has a user or a password, which no reference may have")
        if url.scheme == "file" and (url.netloc or url.query):
            raise _denied(f"{self.shown} names a host or has a query, which a file has not")
        if url.scheme in _BUCKETS and url.query:
            raise _denied(f"{self.shown} has a query, which an object of a bucket has not")
        self.segments = _segments(url.path)
        if any(_is_odd(segment) for segment in self.segments):
            raise _denied(f"{self.shown} has a segment that is not a name")


def _invalid(why):
    return DownloadError("invalid-reference", f"the reference {why}")


def _denied(message):
    return DownloadError("reference-denied", message)


def _unavailable(message):
    return DownloadError("store-unavailable", message)


def _digest(fragment):
    """The digest that a fragment names, in small letters."""
    sha256 = None
    for part in filter(None, fragment.split("&")):
        name, equals, value = part.partition("=")
        if name == "sha256" and equals:
            if not re.fullmatch(r"[0-9a-fA-F]{64}", value):
                raise _invalid("has a sha256 that is not 64 hexadecimal digits")
            sha256 = value.lower()
        elif name != "type" or not equals:
            raise _invalid("has something else than sha256= and type= behind its #")
    return sha256


def _segments(path):
    """The decoded segments of a path, without an empty last one."""
    segments = [urllib.parse.unquote_to_bytes(segment) for segment in path.split("/")[1:]]
    return segments[:-1] if segments and not segments[-1] else segments


def _is_odd(segment):
    """Whether a segment is not a name of an entry: a server, or the system, may take it for several segments or for a way out.

    Servers of Java take what follows a semicolon for a parameter of the segment, and `..;` for the folder above.
    """
    return not segment or segment.partition(b";")[0] in (b".", b"..") or any(byte in segment for byte in (b"/", b"\\", b"\0"))


# Folders.


@contextlib.contextmanager
def _file(reference, folder):
    """Opens a file beneath a folder: what reads it, and its length."""
    if folder is None:
        raise _denied(f"{reference.shown} is a file: name the folder beneath which files may be read (folder=…)")
    root = [part for part in os.fsencode(os.path.abspath(folder)).split(b"/") if part]
    names = reference.segments[len(root):]
    if reference.segments[:len(root)] != root or not names:
        raise _denied(f"{reference.shown} is not beneath {os.fsdecode(os.path.abspath(folder))}")
    file = _opened_beneath(os.path.abspath(folder), names, reference.shown)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _denied(f"{reference.shown} is not a regular file")

        def read(count):
            try:
                return os.read(file, count)
            except OSError as error:
                raise _unavailable(f"read {reference.shown}: {error.strerror}") from error

        yield read, status.st_size
    finally:
        os.close(file)


def _opened_beneath(root, names, shown):
    """A descriptor of a file, opened folder by folder. No link is followed, in no step; the root itself may be one."""
    step = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        folder = os.open(root, step)
    except OSError as error:
        # A disk that is not mounted, and no fault of the reference.
        raise _unavailable(f"open {root}: {error.strerror}") from error
    # A pipe is not waited for, and a terminal not taken.
    as_file = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    for at, name in enumerate(names, 1):
        try:
            opened = os.open(name, (as_file if at == len(names) else step) | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            raise _of_file(error, _is_link(name, folder), shown) from error
        finally:
            os.close(folder)
        folder = opened
    return folder


def _is_link(name, folder):
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _of_file(error, is_link, shown):
    """Why an entry of a folder cannot be opened."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR) and is_link:
        return _denied(f"the path of {shown} has a symbolic link, and links are not followed")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
        return DownloadError("reference-missing", f"there is no file {shown}")
    # A device without a driver, or a socket.
    if error.errno in (errno.EACCES, errno.EPERM, errno.ENXIO, errno.ENODEV):
        return _denied(f"{shown}: {error.strerror}")
    return _unavailable(f"open {shown}: {error.strerror}")


# Web servers.


@contextlib.contextmanager
def _web(reference, private, timeout, ssl_context):
    """Asks a web server: what reads its answer, and the answer's length if the server says it."""
    if reference.scheme == "https" and ssl_context is None:
        ssl_context = ssl.create_default_context()
    connection = _Connection(reference, private, timeout, ssl_context if reference.scheme == "https" else None)

    begin = time.monotonic()

    def late_or(error):
        # The socket's own limit may end a moment before the one for the whole answer.
        is_over = isinstance(error, socket.timeout) and time.monotonic() - begin >= 0.9 * timeout
        if connection.is_late or is_over:
            return _unavailable(f"get {reference.shown}: no complete answer within {timeout:g} s")
        why = str(error)[:SERVER_TEXT_MAX] or type(error).__name__
        return _unavailable(f"get {reference.shown}: {why}")

    with connection:
        try:
            # Unpacked it could be a thousand times as large, and would have another digest.
            headers = {"Accept-Encoding": "identity", "User-Agent": "vramq-python"}
            target = (reference.path or "/") + (f"?{reference.query}" if reference.query else "")
            connection.request("GET", target, headers=headers)
            response = connection.getresponse()
        # ValueError: a name that DNS cannot have.
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise late_or(error) from error
        if response.status != 200:
            response.close()
            raise _of_status(response.status, reference.shown)

        def read(count):
            try:
                piece = response.read(count)
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise late_or(error) from error
            # Without a length an answer ends with its connection, which may have been cut.
            if not piece and (response.length or (response.length is None and connection.is_late)):
                raise late_or("the answer breaks off")
            return piece

        with response:
            yield read, response.length


def _of_status(status, shown):
    if 300 <= status < 400:
        return _denied(f"{shown} is a redirect ({status}), which is not followed")
    if status in (404, 410):
        return DownloadError("reference-missing", f"the server has no {shown} ({status})")
    # It asks for more time, or for fewer requests.
    if status in (408, 425, 429) or 500 <= status < 600:
        return _unavailable(f"the server answers {shown} with {status}")
    return _denied(f"the server answers {shown} with {status}")


class _Connection(http.client.HTTPConnection):
    """Connects to the addresses that were looked up and checked and to no others, through no proxy. After `timeout` seconds it is cut,
    so that a server that sends a byte now and then cannot hold it."""

    def __init__(self, reference, is_private, timeout, ssl_context):
        port = 443 if ssl_context else 80
        super().__init__(reference.host, reference.port or port, timeout=timeout)
        self.default_port = port
        self.is_late = False
        self._reference, self._is_private, self._ssl_context = reference, is_private, ssl_context
        self._until = time.monotonic() + timeout
        # What `_cut` shuts: `sock` is given away with the answer.
        self._open = None
        self._timer = threading.Timer(timeout, self._cut)
        self._timer.daemon = True

    def __enter__(self):
        self._timer.start()
        return self

    def __exit__(self, *_):
        self._timer.cancel()
        self.close()

    def _cut(self):
        self.is_late = True
        if self._open is not None:
            with contextlib.suppress(OSError):
                # Not that of TLS, which would wait for the server.
                socket.socket.shutdown(self._open, socket.SHUT_RDWR)

    def connect(self):
        failure = OSError("the name has no address")
        for family, kind, protocol, _, address in self._addresses():
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(max(0.001, min(CONNECT_S_MAX, self._until - time.monotonic())))
                connection.connect(address)
            except OSError as error:
                connection.close()
                failure = error
                continue
            connection.settimeout(self.timeout)
            self.sock = self._open = connection
            if self._ssl_context is not None:
                self.sock = self._open = self._ssl_context.wrap_socket(
                    connection, server_hostname=self.host, do_handshake_on_connect=False,
                )
                self.sock.do_handshake()
            if self.is_late:
                raise OSError("the connection came too late")
            return
        raise failure

    def _addresses(self):
        """The host's addresses that may be connected to: those and no others are, whatever the name stands for a moment later."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        allowed = [entry for entry in found if self._is_private or is_public(entry[4][0])]
        if found and not allowed:
            raise _denied(f"{self._reference.shown} is at a private address (private=True allows it)")
        return allowed
