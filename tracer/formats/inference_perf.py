"""inference-perf's trace replay: a CSV of times and lengths, in the columns of the Azure release. Pure.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.680590,374,44

Its reader (0.7) keeps six digits and knows no time zone with a whole second, so there are always six and never a zone.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from tracer.formats.azure import HEADER, StampStyle, format_stamp
from tracer.formats.targets import sendable
from tracer.schema import Footer, Request

NAME = "inference_perf"
HOLDS = frozenset({"input_tokens", "output_tokens"})
STEP_NS = 1000
_STYLE = StampStyle(digits=6)


def write(rows: Iterable[Request], footer: Footer, losses: Counter[str]) -> Iterator[bytes]:
    yield HEADER + b"\n"
    for row in sendable(rows, losses):
        stamp = format_stamp((footer.epoch_ns or 0) + row["arrival_ns"], _STYLE)
        yield f"{stamp},{row['input_tokens']},{row['output_tokens']}\n".encode()


def usage(path: str, footer: Footer, rows: int) -> str:
    del footer, rows
    trace = f"{{file: {path}, format: AzurePublicDataset}}"
    return f"inference-perf with load: {{type: trace_replay, trace: {trace}}} and data: {{type: random, trace: {trace}}}"
