"""SGLang's pickled request dumps."""

import os
import pickle
import sys
from collections import deque
from dataclasses import dataclass
from types import ModuleType

import pytest

from tracer.errors import TraceError
from tracer.record.capturing import import_capture

UNKNOWN = {"dispatch_ns", "ttft_ns", "itl_summary", "bytes_in", "bytes_out", "http_status"}


@pytest.fixture
def generate(monkeypatch):
    """SGLang's class of a request, in a module of its name while the dump is written."""

    @dataclass
    class GenerateReqInput:
        text: object = None
        input_ids: object = None
        sampling_params: object = None
        stream: bool = False
        rid: str = "CANARY-rid"

    GenerateReqInput.__module__, GenerateReqInput.__qualname__ = "sglang.srt.managers.io_struct", "GenerateReqInput"
    package, module = ModuleType("sglang"), ModuleType("sglang.srt.managers.io_struct")
    module.GenerateReqInput = GenerateReqInput
    for name in ("sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang", package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return GenerateReqInput


def said(text, **meta):
    told = {"id": "CANARY", "prompt_tokens": 91, "completion_tokens": 7, "cached_tokens": 64, "reasoning_tokens": 3}
    return {"text": text, "meta_info": {**told, "finish_reason": {"type": "length", "length": 7}, **meta}}


SAMPLING = {"max_new_tokens": 50, "temperature": 0.5, "top_p": 0.9, "top_k": 20}
ASKED = {"max_tokens": 50, "temperature": 0.5, "top_p": 0.9, "top_k": 20}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("is_crash", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_a_dumped_request_is_the_row_that_live_recording_makes(tmp_path, traffic, generate, protocol, is_crash, ids) -> None:
    prompt = list(range(100, 140)) if ids else "CANARY prompt of some words " * 9
    one = generate(**{"input_ids" if ids else "text": prompt}, sampling_params=SAMPLING)
    entries = [(one, said(" CANARY-answer of words"), float(traffic.EPOCH_S), traffic.EPOCH_S + 2.0)]
    source = tmp_path / "x.pkl"
    source.write_bytes(
        pickle.dumps({"server_args": one, "requests": deque(entries) and entries} if is_crash else entries, protocol)
    )

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    live = traffic.live_row(report.key_path, {"prompt": prompt, **ASKED}, traffic.completion(), traffic.COMPLETIONS)
    traffic.assert_same_row(row, live, unknown=UNKNOWN)
    assert (report.source_format, report.footer.epoch_ns) == ("sglang", traffic.EPOCH_NS)
    traffic.assert_no_canary(tmp_path, source)


def test_requests_that_a_crash_cut_and_odd_entries(tmp_path, traffic, generate) -> None:
    one, at = generate(text="a"), float(traffic.EPOCH_S)
    bomb = [1]
    for _ in range(100):
        bomb = [bomb, bomb]
    entries = [
        (one, {}, at, at + 9),
        (one, said("x", finish_reason=None), at, at + 9),
        (one, said("x", finish_reason={"type": "abort"}), at, at + 1),
        (generate(input_ids=bomb), said("x"), at, at + 1),
        (one, said("x"), "CANARY", at),
        (one,),
        "CANARY",
        (5, said("x"), at, at),
    ]
    source = tmp_path / "x.pkl"
    source.write_bytes(pickle.dumps(entries))

    report = import_capture(source, tmp_path / "x.parquet")

    rows = traffic.rows_of(tmp_path / "x.parquet")
    assert [(row["error_kind"], row["end_ns"]) for row in rows] == [
        ("recorder_stopped", None),
        ("recorder_stopped", None),
        ("client_abort", 1_000_000_000),
        (None, 1_000_000_000),
    ]
    assert (rows[3]["input_tokens"], rows[3]["input_blocks"], report.bad_entries) == (91, None, 4)
    traffic.assert_no_canary(tmp_path, source)


class _Evil:
    def __init__(self, call, *args):
        self._made = call, args

    def __reduce__(self):
        return self._made


@pytest.mark.parametrize("call", [os.system, eval, exec, __import__, getattr, print])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, generate, call, protocol, capfd) -> None:
    mark = tmp_path / "ran"
    source = tmp_path / "x.pkl"
    source.write_bytes(pickle.dumps([generate(text="a"), _Evil(call, f"touch {mark}")], protocol))

    with pytest.raises(TraceError, match="wants more than a request dump needs"):
        import_capture(source, tmp_path / "x.parquet", source_format="sglang")

    assert (list(tmp_path.iterdir()), capfd.readouterr().out) == ([source], "")


def test_names_below_the_package_reach_no_function(tmp_path) -> None:
    """Such as those that a module of SGLang imported."""
    source = tmp_path / "x.pkl"
    mark = tmp_path / "ran"
    code = b"csglang.srt.utils\nos.system\n(S'touch %s'\ntR." % str(mark).encode()
    source.write_bytes(code)

    with pytest.raises(TraceError):
        import_capture(source, tmp_path / "x.parquet", source_format="sglang")

    assert not mark.exists()
