"""What holds for every format: detection, damage, layout on disk, compressed files."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.errors import TraceError
from tracer.record import capturing
from tracer.record.capturing import CAPTURES, detect_capture, import_capture

SAMPLES = {
    "openai_jsonl": b'{"timestamp": 1760000000, "model": "m", "messages": [{"role": "user", "content": "CANARY"}]}\n',
    "gateway_csv": b'timestamp,request_json\n1760000000,"{""prompt"": ""CANARY""}"\n',
    "goreplay": b"1 abc 1760000000000000000 5\nPOST /v1/completions HTTP/1.1\r\nA: b\r\n\r\n{}" + "\n🐵🙈🙉\n".encode(),
    "har": json.dumps(
        {
            "log": {
                "entries": [
                    {
                        "startedDateTime": "2025-10-09T08:53:20Z",
                        "time": 5,
                        "request": {"method": "POST", "url": "http://h/v1/completions", "postData": {"text": "{}"}},
                        "response": {"status": 200, "headers": [], "content": {"text": "{}"}},
                    }
                ]
            }
        }
    ).encode(),
    "litellm": b'{"call_type": "completion", "startTime": 1760000000.0, "messages": [{"role": "user", "content": "CANARY"}]}\n',
    "langfuse": b'{"type": "GENERATION", "startTime": "2025-10-09T08:53:20Z", "input": "CANARY"}\n',
    "otel": b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "1760000000000000000", "attributes": '
    b'[{"key": "gen_ai.request.model", "value": {"stringValue": "m"}}]}]}]}]}\n',
    "sglang": b"\x80\x02](csglang.io\nGenerateReqInput\n)\x81}X\x04\x00\x00\x00textX\x06\x00\x00\x00CANARYsb}I1760000000\nNta.",
    "mitm": b"300:7:version;2:21#",
}


@pytest.mark.parametrize("name", CAPTURES)
def test_formats_are_told_apart_by_their_beginning(tmp_path, name) -> None:
    path = tmp_path / "x"
    path.write_bytes(SAMPLES[name])

    assert detect_capture(path) == name


@pytest.mark.parametrize("name", [one for one in CAPTURES if one != "mitm"])
def test_compressed_captures_are_read_as_they_are(tmp_path, traffic, name) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(SAMPLES[name]))

    report = import_capture(path, tmp_path / "x.parquet")

    assert (report.source_format, report.rows, report.footer.epoch_ns) == (name, 1, traffic.EPOCH_NS)


def test_a_compressed_capture_that_is_cut_is_refused(tmp_path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(SAMPLES["openai_jsonl"] * 2000)[:-20])

    with pytest.raises(TraceError, match="cut or damaged"):
        import_capture(path, tmp_path / "x.parquet")

    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", CAPTURES)
@settings(deadline=None, max_examples=12)
@given(junk=st.binary(max_size=200), place=st.integers(0, 10_000), size=st.integers(0, 8))
def test_garbage_and_damage_give_rows_or_a_trace_error_and_never_text(name, traffic, tmp_path_factory, junk, place, size) -> None:
    sample = bytearray(SAMPLES[name])
    at = place % len(sample)
    sample[at : at + size] = junk
    folder = tmp_path_factory.mktemp("damage")
    path = folder / "x"

    for data in (junk, bytes(sample), bytes(sample[:at])):
        path.write_bytes(data)
        (folder / "x.parquet").unlink(missing_ok=True)
        (folder / "x.key").unlink(missing_ok=True)
        try:
            import_capture(path, folder / "x.parquet", source_format=name)
        except TraceError as error:
            assert "CANARY" not in str(error)
        traffic.assert_no_canary(folder, path)


def test_an_import_leaves_trace_and_key_and_no_segments(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(SAMPLES["openai_jsonl"])

    report = import_capture(path, tmp_path / "x.parquet")

    assert {one.name for one in tmp_path.iterdir()} == {"log.jsonl", "x.parquet", "x.key"}
    assert report.key_path.stat().st_mode & 0o777 == 0o600


def test_one_key_for_two_imports_gives_traces_that_can_be_compared(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(SAMPLES["openai_jsonl"])
    first = import_capture(path, tmp_path / "x.parquet")

    second = import_capture(path, tmp_path / "y.parquet", key_path=first.key_path)

    assert first.footer.hashes.key_id == second.footer.hashes.key_id
    assert not (tmp_path / "y.key").exists()


@pytest.mark.parametrize(
    ("out", "source_format", "problem"),
    [("x.csv", None, "a trace is a Parquet file"), ("x.parquet", "nonsense", "no such capture format")],
)
def test_user_faults_are_told_and_leave_nothing(tmp_path, out, source_format, problem) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(SAMPLES["openai_jsonl"])

    with pytest.raises(TraceError, match=problem):
        import_capture(path, tmp_path / out, source_format=source_format)

    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_is_never_overwritten(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(SAMPLES["openai_jsonl"])
    import_capture(path, tmp_path / "x.parquet")

    with pytest.raises(TraceError, match="exists already"):
        import_capture(path, tmp_path / "x.parquet")


def test_what_no_format_knows_is_refused_without_quoting_it(tmp_path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"CANARY of another kind")

    with pytest.raises(TraceError, match="no capture that is known") as caught:
        import_capture(path, tmp_path / "x.parquet")

    assert "CANARY" not in str(caught.value)


def test_a_small_window_in_time_loses_no_request(tmp_path, monkeypatch) -> None:
    path = tmp_path / "log.jsonl"
    lines = [{"timestamp": 1760000000 - n, "duration_s": 9, "prompt": f"once upon {n} times"} for n in range(50)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    monkeypatch.setattr(capturing, "MAX_HELD_BYTES", 2000)

    report = import_capture(path, tmp_path / "x.parquet")

    assert (report.rows, report.losses) == (50, {})


def test_whole_seconds_are_seen_as_a_grid(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps({"timestamp": 1760000000 + n // 3, "prompt": "a"}) for n in range(99)))

    assert import_capture(path, tmp_path / "x.parquet").footer.time_grid_ns == 10**9


def test_a_full_disk_stops_the_import_and_leaves_nothing(tmp_path, monkeypatch) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(SAMPLES["openai_jsonl"])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tracer.record.writer.os.fdatasync", full)

    with pytest.raises(TraceError, match="No space left"):
        import_capture(path, tmp_path / "x.parquet")

    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("source", "out"), [("absent", "x.parquet"), ("log.jsonl", "absent/x.parquet"), (".", "x.parquet")])
def test_paths_that_cannot_be_used_are_trace_errors(tmp_path, source, out) -> None:
    (tmp_path / "log.jsonl").write_bytes(SAMPLES["openai_jsonl"])

    with pytest.raises(TraceError):
        import_capture(tmp_path / source, tmp_path / out)
