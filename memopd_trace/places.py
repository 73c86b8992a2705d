"""Where a trace lies: a local `Path`, or a `RemotePath` that answers the same questions about an object store.

Remote paths are URIs: `s3://bucket/key`, with options as a query (`?region=…&endpoint_override=host:port&scheme=http`),
and likewise `gs://`. Credentials come from where each store's own tools look for them, never from the URI, which is
printed; `AWS_ENDPOINT_URL` names another S3 server. An object store has no folders, no rename and no lock: a file is
uploaded when it is whole, and two writers of one name do not see each other.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qsl, urlencode

import pyarrow as pa
from pyarrow import fs

from memopd_trace import disk
from memopd_trace.errors import UsageError

_URI = re.compile(r"(s3|gs):/+([^?]*)\??(.*)")
READ_BYTES = 4 * 2**20  # hashed at a time: one request to a store
PathLike = str | os.PathLike[str]


class RemotePath:
    """A file or folder of an object store, with the methods of `Path` that this project uses.

    Raises:
        OSError: from every method that asks the store: out of reach, no such bucket, no permission.
    """

    def __init__(self, scheme: str, key: str, query: str = "") -> None:
        self.scheme, self.key, self.query = scheme, key.strip("/"), query

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.scheme, self.key, self.query))

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.scheme, f"{self.key}/{name}", self.query)

    @property
    def name(self) -> str:
        """What stands behind the last slash."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The name's suffix, dot included."""
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """What stands in front of the last slash."""
        return RemotePath(self.scheme, self.key.rpartition("/")[0], self.query)

    @property
    def store(self) -> fs.FileSystem:
        """The store, opened once in a process."""
        return _store(self.scheme, self.key.partition("/")[0], self.query)

    def _info(self) -> fs.FileInfo:
        return self.store.get_file_info(self.key)

    def exists(self) -> bool:
        """Whether a file has this name, or one in the folder."""
        return bool(self._info().type != fs.FileType.NotFound)

    def is_file(self) -> bool:
        """Whether a file has this name."""
        return bool(self._info().type == fs.FileType.File)

    def is_dir(self) -> bool:
        """Whether files lie under this name."""
        return bool(self._info().type == fs.FileType.Directory)

    def stat(self) -> os.stat_result:
        """Kind and size; the other fields are 0.

        Raises:
            FileNotFoundError: nothing is there.
        """
        info = self._info()
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(f"{self}: no such file or folder")
        mode = stat.S_IFDIR if info.type == fs.FileType.Directory else stat.S_IFREG
        return os.stat_result((mode, 0, 0, 0, 0, 0, info.size or 0, 0, 0, 0))

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """The file, open for reading bytes anywhere in it."""
        if mode != "rb":
            raise ValueError(f"{self}: is read by open(), and written by atomic_file()")
        return self.store.open_input_file(self.key)

    def read_bytes(self) -> bytes:
        """The whole file."""
        with self.open() as source:
            return bytes(source.read())

    def read_text(self) -> str:
        """The whole file as UTF-8."""
        return self.read_bytes().decode()

    def iterdir(self) -> Iterator[RemotePath]:
        """Files and folders directly in this folder."""
        for info in self.store.get_file_info(fs.FileSelector(self.key, allow_not_found=True)):
            yield self / info.base_name

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Files directly in this folder whose name matches."""
        for info in self.store.get_file_info(fs.FileSelector(self.key, allow_not_found=True)):
            if info.type == fs.FileType.File and fnmatch.fnmatchcase(info.base_name, pattern):
                yield self / info.base_name

    def mkdir(self, parents: bool = False) -> None:
        """Nothing: a folder is there as soon as a file is."""

    def rmdir(self) -> None:
        """Nothing: a folder is gone with its last file."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file."""
        if self.is_file() or not missing_ok:
            self.store.delete_file(self.key)


Place = Path | RemotePath


def place(path: PathLike | RemotePath) -> Place:
    """A path or URI as an object to ask; nothing is looked up yet.

    A `Path` made of a URI has lost one slash, which is put back.

    Raises:
        UsageError: the URI holds credentials.
    """
    if isinstance(path, RemotePath):
        return path
    found = _URI.fullmatch(os.fspath(path))
    if found is not None and "@" in found[2].partition("/")[0]:
        raise UsageError(
            f"{found[1]}:// with a name in front of the bucket's",
            hint="give credentials by the environment, not the URI",
        )
    return Path(path) if found is None else RemotePath(*found.groups())


def open_arrow(path: Place) -> pa.NativeFile:
    """The file, open for Arrow's readers."""
    # a local name may be any bytes
    return path.open() if isinstance(path, RemotePath) else pa.OSFile(os.fsencode(path))


def size_of(path: Place) -> int:
    """Bytes of a file, or of the files in a folder; 0 where they cannot be asked for."""
    try:
        files = path.glob("*") if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0


def file_sha256(path: Place) -> str:
    """Hex SHA-256 of a file's bytes, of which memory holds `READ_BYTES`; a remote file is fetched whole."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while part := source.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


@contextmanager
def local_copy(path: Place) -> Iterator[Path]:
    """A local file with these bytes, for libraries that read nothing else: itself, or a copy that is removed again."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="memopd-trace-") as spool:
        fs.copy_files(path.key, spool.name, source_filesystem=path.store, destination_filesystem=fs.LocalFileSystem())
        yield Path(spool.name)


def exclusive(folder: Place, doing: str) -> AbstractContextManager[None]:
    """Hold a folder for one process (see `disk.exclusive`); one in a store cannot be held."""
    return nullcontext() if isinstance(folder, RemotePath) else disk.exclusive(folder, doing)


def remove_leftovers(folder: Place) -> None:
    """Remove the temporary files that killed writers left in a folder; a store has none."""
    if not isinstance(folder, RemotePath):
        disk.remove_leftovers(folder)


def is_node(path: Place) -> bool:
    """Whether it is a device, a FIFO or a socket."""
    return not isinstance(path, RemotePath) and disk.is_node(path)


def must_be_file(path: Place) -> None:
    """Raises:
    UsageError: a file cannot be written here (see `disk.regular_target`).
    """
    if not isinstance(path, RemotePath):
        disk.regular_target(path)


def sync_folder(path: Place) -> None:
    """Make what happened in a folder durable; a store does so by itself."""
    if not isinstance(path, RemotePath):
        disk.sync_folder(path)


@contextmanager
def atomic_file(path: Place, *, new: bool = False) -> Iterator[IO[bytes]]:
    """A file open for writing that appears whole or not at all (see `disk.atomic_file`).

    A remote file is written to a local temporary file and uploaded on leaving; with `new` it is refused if the name is
    taken by then, though not by a writer that ends in the same moment.
    """
    if not isinstance(path, RemotePath):
        with disk.atomic_file(path, new=new) as out:
            yield out
        return
    with tempfile.NamedTemporaryFile(prefix="memopd-trace-") as spool:
        yield spool
        spool.flush()
        if new and path.exists():
            raise UsageError(f"{path}: exists already, written by another meanwhile", hint="write elsewhere")
        fs.copy_files(spool.name, path.key, source_filesystem=fs.LocalFileSystem(), destination_filesystem=path.store)


@cache
def _store(scheme: str, bucket: str, query: str) -> fs.FileSystem:
    options = dict(parse_qsl(query))
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if scheme == "s3" and endpoint and "endpoint_override" not in options:
        protocol, _, host = endpoint.rpartition("://")
        options |= {"endpoint_override": host.rstrip("/"), "scheme": protocol or "https"}
    uri = f"{scheme}://{bucket}" + (f"?{urlencode(options, safe=':')}" if options else "")
    try:
        return fs.FileSystem.from_uri(uri)[0]
    except (pa.ArrowException, ValueError) as error:
        raise OSError(str(error)) from None
