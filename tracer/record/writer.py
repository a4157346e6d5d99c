"""Crash-safe segments: append-only files of checked records. Whatever is cut or torn costs only what lies behind it.

    file   = MAGIC, record*          named 000000.open while it grows, 000000.seg when closed
    record = length u32, crc32 u32 (little endian, of the payload), payload
    The first payload of each file is its header.

A disk that fails stops the writing, never the caller: records wait in bounded memory, what does not fit is counted.
"""

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tracer.errors import TraceError

MAGIC = b"CHATREEL1\n"
MAX_PAYLOAD_BYTES = 256 << 20
ROTATE_BYTES = 64 << 20
ROTATE_NS = 3600 * 1_000_000_000
FLUSH_NS = 500_000_000  # with the way to the worker, a kill then costs less than the last second
RETRY_NS = 10_000_000_000
MAX_WAITING_BYTES = 32 << 20  # in memory while the disk fails
BATCH_BYTES = 1 << 20

_HEAD = struct.Struct("<II")

Open = Callable[[Path], BinaryIO]


def open_new(path: Path) -> BinaryIO:
    """A new file, unbuffered, 0600; never follows a link, never overwrites."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)


def frame(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


class SegmentWriter:
    """`add` records, call `tick` often; both are quick and never raise OSError.

    `rows_lost` counts rows that will never be written, `error` is the disk's last complaint (None while all is well).
    Records that are no rows (`is_row` False) are dropped uncounted where there is no room.
    """

    def __init__(self, folder: Path, header: bytes, now_ns: int, open_: Open = open_new) -> None:
        self.rows_written = 0
        self.rows_waiting = 0
        self.rows_lost = 0
        self.error: str | None = None
        self._folder = folder
        self._header = frame(header)
        self._open = open_
        self._number = next_number(folder)
        self._file: BinaryIO | None = None
        self._path = folder
        self._size = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._flush_at_ns = now_ns + FLUSH_NS
        self._rotate_at_ns = now_ns + ROTATE_NS
        self._begin()

    def add(self, payload: bytes, *, is_row: bool = True) -> None:
        if self._waiting_bytes + len(payload) > MAX_WAITING_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
            self.rows_lost += is_row
            return
        self.rows_waiting += is_row
        self._waiting.append(frame(payload))
        self._waiting_bytes += len(payload)
        if self._waiting_bytes > BATCH_BYTES and self.error is None:
            self._flush()

    def tick(self, now_ns: int) -> None:
        """Write what waits if its time has come: each half second, or ten seconds after the disk failed.

        Each hour what was written is closed, so that it can be copied away.
        """
        if now_ns < self._flush_at_ns:
            return
        self._flush()
        self._flush_at_ns = now_ns + (RETRY_NS if self.error else FLUSH_NS)
        if now_ns >= self._rotate_at_ns:
            self._rotate_at_ns = now_ns + ROTATE_NS
            if self._size > len(MAGIC) + len(self._header):
                self._close_file()

    def close(self) -> None:
        """Last try to write; what still waits is lost."""
        self._flush()
        self.rows_lost += self.rows_waiting
        self._forget()
        self._close_file()

    def _flush(self) -> None:
        if not self._waiting:
            return
        try:
            file = self._file or self._next_file()
            self._write_all(file, b"".join(self._waiting))
            os.fdatasync(file.fileno())
        except OSError as error:
            self._fail(error)
            return
        self.error = None
        self.rows_written += self.rows_waiting
        self._forget()
        if self._size >= ROTATE_BYTES:
            self._close_file()

    def _forget(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = self.rows_waiting = 0

    def _begin(self) -> None:
        """So that a recording of no requests is an empty one, not a missing one."""
        try:
            self._next_file()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.error = error.strerror or str(error)
        self._give_up_file()

    def _next_file(self) -> BinaryIO:
        path = self._folder / f"{self._number:06d}.open"
        file = self._open(path)
        self._number += 1
        self._file, self._path, self._size = file, path, 0
        self._write_all(file, MAGIC + self._header)
        return file

    def _write_all(self, file: BinaryIO, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = file.write(view)
            view = view[written:]
        self._size += len(data)

    def _give_up_file(self) -> None:
        """The file ends in a torn record, so nothing may follow there: cut it off, and let the retry open a new one."""
        if self._file is not None:
            try:
                os.ftruncate(self._file.fileno(), self._size)
            except OSError:
                pass  # readers stop at the torn record by themselves
        path, is_empty = self._path, self._size == 0
        self._close_file()
        if is_empty and path != self._folder:
            path.with_suffix(".seg").unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
            self._path.rename(self._path.with_suffix(".seg"))
        except OSError:
            pass  # readers take *.open as well
        self._file = None


def next_number(folder: Path) -> int:
    return 1 + max((int(path.stem) for path in segment_paths(folder)), default=-1)


def segments_folder(recording: Path) -> Path:
    return recording.with_suffix(".segments")


def segment_paths(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if path.suffix in (".open", ".seg") and path.stem.isdecimal()]
    return sorted(found, key=lambda path: int(path.stem))


def lane_folder(folder: Path, number: int) -> Path:
    """Where one of several writers of a recording has its segments."""
    return folder / f"lane-{number:06d}"


def series_folders(folder: Path) -> list[Path]:
    """All folders of a recording that may hold segments: its own, and one per lane."""
    return [folder, *sorted(folder.glob("lane-*"))]


class SegmentReader:
    """Iterates (offset, payload) up to the end or the first record that is cut or damaged.

    Afterwards `torn_bytes` says how much was left unread.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.torn_bytes = 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        good = 0
        if self._file.read(len(MAGIC)) == MAGIC:
            good = len(MAGIC)
            while (payload := read_record(self._file, size - good)) is not None:
                yield good, payload
                good += _HEAD.size + len(payload)
                self._file.seek(good)
        self.torn_bytes = size - good


def read_record(file: BinaryIO, available: int = MAX_PAYLOAD_BYTES + _HEAD.size) -> bytes | None:
    """The record at the file's position, or None if no whole and sound one stands there."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, crc = _HEAD.unpack(head)
    if length > min(available - _HEAD.size, MAX_PAYLOAD_BYTES):
        return None
    payload = file.read(length)
    return payload if len(payload) == length and zlib.crc32(payload) == crc else None


def lock_folder(folder: Path, wait_s: float) -> int:
    """Descriptor of a lock that lives as long as it is open: one writer, and no compaction while it writes."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise TraceError("this recording still runs", path=str(folder), next_step="Stop the recorder first") from None
            time.sleep(0.1)
