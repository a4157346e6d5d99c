"""Segments survive cuts, damage and full disks; losses are counted."""

import errno
import os
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.errors import TraceError
from tracer.record import writer as module
from tracer.record.writer import (
    FLUSH_NS,
    MAGIC,
    RETRY_NS,
    ROTATE_NS,
    SegmentReader,
    SegmentWriter,
    frame,
    lock_folder,
    open_new,
    segment_paths,
)

PAYLOADS = st.lists(st.binary(max_size=40), min_size=1, max_size=12)


def read(data: bytes) -> tuple[list[bytes], int]:
    reader = SegmentReader(BytesIO(data))
    return [payload for _, payload in reader], reader.torn_bytes


def folder_records(folder: Path) -> list[bytes]:
    """All records but the headers."""
    return [payload for path in segment_paths(folder) for payload in read(path.read_bytes())[0][1:]]


@given(payloads=PAYLOADS, data=st.data())
@settings(deadline=None, max_examples=150)
def test_any_truncation_gives_a_prefix_of_the_records(payloads: list[bytes], data: st.DataObject) -> None:
    whole = MAGIC + b"".join(frame(payload) for payload in payloads)
    cut = data.draw(st.integers(0, len(whole)))

    found, torn = read(whole[:cut])

    assert found == payloads[: len(found)]
    assert len(MAGIC + b"".join(frame(payload) for payload in found)) + torn == max(cut, len(MAGIC)) or found == []
    if cut == len(whole):
        assert (found, torn) == (payloads, 0)


@given(payloads=PAYLOADS, data=st.data())
@settings(deadline=None, max_examples=150)
def test_a_flipped_bit_costs_no_record_before_it(payloads: list[bytes], data: st.DataObject) -> None:
    whole = bytearray(MAGIC + b"".join(frame(payload) for payload in payloads))
    at = data.draw(st.integers(len(MAGIC), len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))

    found, torn = read(bytes(whole))

    ends = [len(MAGIC) + len(b"".join(map(frame, payloads[: n + 1]))) for n in range(len(payloads))]
    assert found == payloads[: sum(end <= at for end in ends)]
    assert torn > 0


def test_records_are_on_disk_after_half_a_second_and_files_are_private(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, b"header", 0)
    writer.add(b"one")
    writer.tick(FLUSH_NS - 1)
    before = folder_records(tmp_path)
    writer.tick(FLUSH_NS)

    assert (before, folder_records(tmp_path)) == ([], [b"one"])
    assert [path.name for path in segment_paths(tmp_path)] == ["000000.open"]
    assert segment_paths(tmp_path)[0].stat().st_mode & 0o777 == 0o600
    writer.close()
    assert [path.name for path in segment_paths(tmp_path)] == ["000000.seg"]


def test_a_full_segment_is_closed_and_the_next_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROTATE_BYTES", 100)
    writer = SegmentWriter(tmp_path, b"header", 0)

    for second in range(1, 5):
        writer.add(bytes(60))
        writer.tick(second * 2 * FLUSH_NS)
    writer.close()

    assert [path.name for path in segment_paths(tmp_path)] == ["000000.seg", "000001.seg"]
    assert folder_records(tmp_path) == [bytes(60)] * 4


def test_what_was_written_is_closed_each_hour_and_an_idle_hour_makes_no_file(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, b"header", 0)

    writer.tick(ROTATE_NS)
    writer.add(b"one")
    writer.tick(2 * ROTATE_NS)
    names = [path.name for path in segment_paths(tmp_path)]
    writer.tick(3 * ROTATE_NS)
    writer.add(b"two")
    writer.tick(4 * ROTATE_NS - 1)

    assert names == ["000000.seg"]
    assert [path.name for path in segment_paths(tmp_path)] == ["000000.seg", "000001.open"]
    assert folder_records(tmp_path) == [b"one", b"two"]
    writer.close()


class FailingDisk:
    """Opens files that hold `room` bytes in all; a write may be cut in its middle, as on a real disk."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, path: Path) -> BinaryIO:
        return _File(self, open_new(path))  # type: ignore[return-value]


class _File:
    def __init__(self, disk: FailingDisk, file: BinaryIO) -> None:
        self._disk, self._file = disk, file
        self.close, self.fileno = file.close, file.fileno

    def write(self, data: memoryview) -> int:
        if self._disk.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._file.write(data[: self._disk.room])
        self._disk.room -= taken
        return taken


@given(room=st.integers(0, 400), sizes=st.lists(st.integers(0, 60), min_size=1, max_size=12))
@settings(deadline=None, max_examples=60)
def test_a_full_disk_stops_writing_and_nothing_is_lost_once_there_is_room(
    tmp_path_factory: pytest.TempPathFactory, room: int, sizes: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    disk = FailingDisk(room)
    writer = SegmentWriter(folder, b"header", 0, disk)
    payloads = [bytes([number]) * size for number, size in enumerate(sizes)]

    for number, payload in enumerate(payloads):
        writer.add(payload)
        writer.tick((number + 1) * FLUSH_NS)
    disk.room = 10**6
    writer.tick(10**12)
    writer.close()

    assert folder_records(folder) == payloads
    assert (writer.rows_lost, writer.error) == (0, None)
    assert writer.rows_written == len(payloads)


def test_a_disk_that_stays_full_is_retried_each_ten_seconds_and_losses_are_counted(tmp_path: Path) -> None:
    disk = FailingDisk(0)
    writer = SegmentWriter(tmp_path, b"header", 0, disk)
    writer.add(b"one")
    writer.tick(FLUSH_NS)
    assert writer.error == "No space left on device"
    disk.room = 10**6

    writer.tick(FLUSH_NS + RETRY_NS - 1)
    assert writer.error is not None
    disk.room = 0
    writer.tick(FLUSH_NS + RETRY_NS)
    writer.close()

    assert (writer.rows_lost, writer.rows_written) == (1, 0)
    assert segment_paths(tmp_path) == []


def test_waiting_records_are_bounded_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 100)
    writer = SegmentWriter(tmp_path, b"header", 0, FailingDisk(0))

    for _ in range(5):
        writer.add(bytes(40))

    assert (writer.rows_waiting, writer.rows_lost) == (2, 3)


def test_no_records_is_an_empty_segment(tmp_path: Path) -> None:
    SegmentWriter(tmp_path, b"header", 0).close()

    assert [read(path.read_bytes()) for path in segment_paths(tmp_path)] == [([b"header"], 0)]


def test_a_new_writer_never_touches_earlier_segments(tmp_path: Path) -> None:
    for payload in (b"one", b"two"):
        writer = SegmentWriter(tmp_path, b"header", 0)
        writer.add(payload)
        writer.close()

    assert folder_records(tmp_path) == [b"one", b"two"]


def test_one_lock_per_folder(tmp_path: Path) -> None:
    held = lock_folder(tmp_path, wait_s=0)

    with pytest.raises(TraceError, match="still runs"):
        lock_folder(tmp_path, wait_s=0)
    os.close(held)
    os.close(lock_folder(tmp_path, wait_s=0))
