"""Azure CSV to rows and back, to the last digit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.formats import BadRow, Detected, azure
from tracer.formats.azure import StampStyle, format_stamp, parse_stamp
from tracer.schema import Footer, Request

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def parse(text: str) -> tuple[list[Request], list[BadRow], Detected]:
    bad: list[BadRow] = []
    found = Detected()
    return list(azure.read(text.encode().splitlines(keepends=True), found, bad.append)), bad, found


def footer_of(found: Detected) -> Footer:
    return Footer(source_format="azure", epoch_ns=found.epoch_ns, notes=found.notes)


STYLES = st.builds(
    StampStyle,
    digits=st.integers(0, 9),
    zone=st.sampled_from(["", "Z", "+00:00", "-07:30", "+05:45"]),
    separator=st.sampled_from(" T"),
)


@given(st.integers(86_400 * 10**9, 9 * 10**18), STYLES)
@settings(max_examples=200, deadline=None)
def test_a_stamp_is_read_and_written_alike_in_every_style(ns: int, style: StampStyle) -> None:
    text = format_stamp(ns, style)

    read_ns, read_style = parse_stamp(text)

    assert read_style == style
    assert ns - read_ns == ns % 10 ** (9 - style.digits)  # only digits that are not written are lost
    assert format_stamp(read_ns, read_style) == text


@given(
    st.lists(st.tuples(st.integers(0, 10**17), STYLES, *[st.integers(0, 2**31 - 1)] * 2, st.integers(0, 9)), min_size=1),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_a_file_comes_back_as_the_same_text(
    rows: list[tuple[int, StampStyle, int, int, int]], has_images: bool, end: str, ends_with_newline: bool
) -> None:
    lines = [HEADER + ",NumImages" * has_images]
    for at, style, asked, answered, images in rows:
        stamp = format_stamp(1_700_158_546 * 10**9 + at, style)
        lines.append(f"{stamp},{asked},{answered}" + f",{images}" * has_images)
    text = end.join(lines) + end * ends_with_newline

    parsed, bad, found = parse(text)

    assert bad == []
    assert b"".join(azure.write(parsed, footer_of(found))).decode() == text


def test_rows_count_from_the_first_stamp() -> None:
    rows, _, found = parse(HEADER + "\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n")

    assert [row["arrival_ns"] for row in rows] == [0, 4_314_579_000]
    assert (rows[1]["input_tokens"], rows[1]["output_tokens"]) == (396, 109)
    assert (found.epoch_ns, found.time_unit_ns) == (1_700_158_546_680_590_000, 100)


def test_stamps_with_a_zone_are_the_same_moments() -> None:
    rows, _, found = parse(f"{HEADER}\n2024-05-10 00:00:00.009930+00:00,1,2\n2024-05-10 02:00:01+02:00,1,2\n")

    assert [row["arrival_ns"] for row in rows] == [0, 990_070_000]
    assert found.time_unit_ns == 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2023-11-16 18:15:46.68", "1 columns, wanted 3"),
        ("2023-11-16 18:15:46.68,1,2,3", "4 columns, wanted 3"),
        ("16/11/2023,1,2", "is no time stamp"),
        ("2023-13-16 18:15:46,1,2", "month must be in 1..12"),
        ("0001-01-01 00:00:00,1,2", "year 0001"),
        ("2023-11-16 18:15:46.68,-1,2", "'-1' is no count"),
        ("2023-11-16 18:15:46.68,1,2.5", "'2.5' is no count"),
        ("2023-11-16 18:15:46.68,99999999999,2", "is no count"),
        ("2023-11-16 18:15:46.68,,2", "'' is no count"),
    ],
)
def test_a_bad_line_is_named_with_its_reason_and_the_others_are_read(text: str, reason: str) -> None:
    good = "2023-11-16 18:15:46.680,374,44"

    rows, bad, _ = parse(f"{HEADER}\n{good}\n{text}\n\n{good}\n")

    assert len(rows) == 2
    assert [(one.line, one.text) for one in bad] == [(3, text)]
    assert reason in bad[0].reason


def test_more_images_than_anyone_sends_are_a_bad_row() -> None:
    _, bad, _ = parse(f"{HEADER},NumImages\n2023-11-16 18:15:46,1,2,2000000000\n2023-11-16 18:15:46,1,2,x\n")

    assert [one.reason for one in bad] == [
        "2000000000 images, wanted at most 10000",
        "'x' is no count, wanted 0 .. 2147483647",
    ]


def test_a_file_with_another_header_says_so() -> None:
    _, bad, _ = parse("Timestamp,Model\n1,GPT\n")

    assert bad[0].line == 1 and "no header" in bad[0].reason
    assert not azure.looks_like(b"TIMESTAMP,ContextTokens,GeneratedTokens,Model\n")
    assert azure.looks_like(b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens,NumImages\r\n")
