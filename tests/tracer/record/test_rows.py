"""What a row may hold, how prompts and answers become blocks, and which state names link them."""

import json
from array import array

import msgspec
import pytest

from tracer.record.exchange import ExchangeFacts
from tracer.record.messages import Ended, Row, Started
from tracer.record.privacy import Hasher
from tracer.record.rows import RowBuilder, itl_summary
from tracer.tokens import encode_chat, load_tokenizer
from tracer.wire import CHAT, COMPLETIONS
from tracer.wire.facts import Usage

CL100K = load_tokenizer("cl100k")
HASHER = Hasher(bytes(32))


@pytest.fixture
def builder() -> RowBuilder:
    return RowBuilder(CL100K, HASHER, chunk_times=True)


def exchange(
    builder: RowBuilder,
    body: dict[str, object] | bytes | None,
    endpoint: str = CHAT,
    facts: ExchangeFacts | None = None,
    **started: bytes,
) -> Row:
    raw = json.dumps(body).encode() if isinstance(body, dict) else body
    pending = builder.start(Started(flow=1, arrival_ns=5, endpoint=endpoint, body=raw, **started))
    return builder.end(pending, Ended(flow=1, arrival_ns=5, endpoint=endpoint, facts=facts or ExchangeFacts()))


def chat(*texts: str, **more: object) -> dict[str, object]:
    """System, then user and assistant in turn."""
    roles = ["system"] + ["user", "assistant"] * len(texts)
    return {"model": "m", "messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)], **more}


def said(text: str = "", usage: Usage | None = None, ids: list[int] | None = None) -> ExchangeFacts:
    return ExchangeFacts(text=text, usage=usage, token_ids=ids, http_status=200, finish_reason="stop", end_ns=9)


def test_chat_prompts_are_counted_and_cut_into_full_blocks_and_a_tail(builder: RowBuilder) -> None:
    body = chat("You are helpful. " * 20, "hello")
    tokens = sum(len(part) for part in encode_chat(CL100K, body["messages"]))

    row = exchange(builder, body, facts=said("fine"))

    assert (row.row["input_tokens"], row.row["input_tokens_count_source"]) == (tokens, "tokenizer")
    assert len(row.input_hashes) == 8 * (tokens // 16)
    assert bool(row.input_tail) == bool(tokens % 16)
    assert row.row["output_tokens"] == 1


def test_the_next_turn_begins_with_the_blocks_of_prompt_and_answer(builder: RowBuilder) -> None:
    first = exchange(builder, chat("Rules. " * 40, "hello"), facts=said(" word" * 50))
    second = exchange(builder, chat("Rules. " * 40, "hello", " word" * 50, "more"), facts=said("ok"))

    blocks = first.input_hashes + first.output_hashes
    assert len(first.output_hashes) >= 8 * 3
    assert second.input_hashes.startswith(blocks)


def test_token_ids_are_hashed_as_they_are(builder: RowBuilder) -> None:
    ids = list(range(1000, 1040))

    row = exchange(builder, {"model": "m", "prompt": ids}, COMPLETIONS, said("ab", ids=[7] * 8))
    next_row = exchange(builder, {"model": "m", "prompt": ids + [7] * 8 + [1]}, COMPLETIONS)

    assert row.row["input_tokens"] == 40
    assert (len(row.input_hashes), len(row.output_hashes), row.row["output_tokens"]) == (16, 8, 8)
    assert next_row.input_hashes == row.input_hashes + row.output_hashes
    assert set(row.leaves) & set(next_row.extends)


def test_text_prompts_go_through_the_tokenizer(builder: RowBuilder) -> None:
    text = "once upon a time " * 10

    row = exchange(builder, {"model": "m", "prompt": text}, COMPLETIONS)

    assert row.row["input_tokens"] == len(CL100K.encode(text))


def test_several_prompts_in_one_request_have_no_blocks(builder: RowBuilder) -> None:
    row = exchange(builder, {"model": "m", "prompt": ["a", "b"]}, COMPLETIONS)

    assert (row.input_hashes, row.row.get("input_tokens")) == (b"", None)
    assert builder.counts == {"prompts_of_several": 1}


def test_usage_decides_lengths_and_drift_is_counted(builder: RowBuilder) -> None:
    body = {"model": "m", "prompt": list(range(20))}

    same = exchange(builder, body, COMPLETIONS, said("a", Usage(prompt_tokens=20, completion_tokens=3, cached_tokens=16)))
    other = exchange(builder, body, COMPLETIONS, said("a", Usage(prompt_tokens=23)))

    assert (same.row["input_tokens"], same.row["input_tokens_count_source"]) == (20, "usage")
    assert (same.row["output_tokens"], same.row["cached_tokens"]) == (3, 16)
    assert (other.row["input_tokens"], len(other.input_hashes)) == (23, 8)
    assert builder.counts == {"token_drift": 1}


def test_models_and_salts_do_not_share_blocks(builder: RowBuilder) -> None:
    bodies = [{"model": "m"}, {"model": "n"}, {"model": "m", "cache_salt": "s"}]

    hashes = {exchange(builder, {**body, "prompt": list(range(32))}, COMPLETIONS).input_hashes for body in bodies}

    assert len(hashes) == 3


def test_chat_turns_are_linked_by_their_answer_first(builder: RowBuilder) -> None:
    first = exchange(builder, chat("Rules.", "hello"), facts=said("fine"))
    exact = exchange(builder, chat("Rules.", "hello", "fine", "more"))
    edited = exchange(builder, chat("Rules.", "hello", "FINE!", "more"))
    other = exchange(builder, chat("Rules.", "goodbye", "fine", "more"))

    assert exact.extends == first.leaves
    assert edited.extends[1] == first.leaves[1]
    assert not set(other.extends) & set(first.leaves)


def test_short_raw_answers_link_too(builder: RowBuilder) -> None:
    first = exchange(builder, {"model": "m", "prompt": [1, 2, 3]}, COMPLETIONS, said("x", ids=[4]))

    next_turn = exchange(builder, {"model": "m", "prompt": [1, 2, 3, 4, 5]}, COMPLETIONS)
    repeated = exchange(builder, {"model": "m", "prompt": [1, 2, 3]}, COMPLETIONS)

    assert next_turn.extends[0] == first.leaves[0]
    assert repeated.extends == []


def test_keys_of_the_client_become_digests(builder: RowBuilder) -> None:
    by_key = exchange(builder, chat("a", prompt_cache_key="conv-1", user="anna@example.org"))
    by_header = exchange(builder, chat("a"), session_header=b"s-9", credential=b"Bearer sk-1")

    assert by_key.session != by_header.session
    assert by_key.client != by_header.client
    assert all(len(one) == 8 for one in (by_key.session, by_key.client, by_header.session, by_header.client) if one)


def test_a_shed_prompt_leaves_times_and_usage(builder: RowBuilder) -> None:
    row = exchange(builder, None, facts=said("text", Usage(prompt_tokens=7, completion_tokens=2)))

    assert (row.row["input_tokens"], row.row["output_tokens"], row.row["end_ns"]) == (7, 2, 9)
    assert (row.input_hashes, row.output_hashes) == (b"", b"")


@pytest.mark.parametrize(
    "body",
    [b"", b"junk", b"[]", b'{"messages": 5}', b'{"max_tokens": "x"}', b'{"prompt": [-1]}', b'{"messages": [1]}', b"\xff"],
)
def test_anything_a_client_sends_becomes_a_row(builder: RowBuilder, body: bytes) -> None:
    for endpoint in (CHAT, COMPLETIONS):
        assert exchange(builder, body, endpoint).row["endpoint"] == endpoint


def test_values_that_no_column_can_hold_are_left_out(builder: RowBuilder) -> None:
    usage = Usage(prompt_tokens=2**40, completion_tokens=5)

    row = exchange(builder, chat("a", max_tokens=2**33, n=2**50), facts=said("a", usage)).row

    assert {"max_tokens", "n"}.isdisjoint(row)
    assert (row["input_tokens_count_source"], row["output_tokens"]) == ("tokenizer", 5)


def test_no_text_key_or_name_is_in_a_row(builder: RowBuilder) -> None:
    body = chat(
        "CANARY-system",
        "CANARY-user",
        user="CANARY-name",
        prompt_cache_key="CANARY-key",
        cache_salt="CANARY-salt",
        tools=[{"type": "function", "function": {"name": "CANARY-tool"}}],
        tool_choice={"type": "function", "function": {"name": "CANARY-tool"}},
        response_format={"type": "CANARY-format", "json_schema": {"name": "CANARY-schema"}},
        stop=["CANARY-stop"],
        metadata={"x": "CANARY-meta"},
    )
    facts = ExchangeFacts(text="CANARY-answer", reasoning="CANARY-thought", tool_text="CANARY-call")
    facts.finish_reason = "CANARY reason"

    row = exchange(builder, body, facts=facts, credential=b"Bearer CANARY-secret", session_header=b"CANARY-session")

    assert b"CANARY" not in msgspec.msgpack.encode(row)
    assert (row.row["tool_choice"], row.row["response_format"]) == ("named", "other")
    assert (row.row["tools_count"], row.row["finish_reason"]) == (1, "other")


def test_gaps_are_per_token_where_counts_are_known() -> None:
    per_token = itl_summary(array("i", [900, 30, 10]), array("i", [1, 3, 1]))
    per_chunk = itl_summary(array("i", [900, 30, 10]), None)

    assert per_token is not None and per_chunk is not None
    assert (per_token["unit"], per_token["count"], per_token["mean_us"], per_token["max_us"]) == ("token", 4, 10.0, 10.0)
    assert (per_chunk["unit"], per_chunk["count"], per_chunk["max_us"]) == ("chunk", 2, 30.0)
    assert itl_summary(array("i", [900]), None) is None


def test_a_model_may_have_a_tokenizer_of_its_own() -> None:
    o200k = load_tokenizer("o200k")
    one = RowBuilder(CL100K, HASHER, chunk_times=False, by_model={"gpt-4o": o200k})
    messages = [{"role": "user", "content": "пятьдесят слов на языке, который они режут по-разному"}]

    tokens = {
        model: one.start(
            Started(flow=1, arrival_ns=0, endpoint=CHAT, body=json.dumps({"model": model, "messages": messages}).encode())
        ).tokens
        for model in ("gpt-4o", "other")
    }

    assert tokens["gpt-4o"] == sum(map(len, encode_chat(o200k, messages)))
    assert tokens["other"] == sum(map(len, encode_chat(CL100K, messages)))
    assert tokens["gpt-4o"] != tokens["other"]


def test_where_the_server_counts_otherwise_both_counts_are_kept(builder: RowBuilder) -> None:
    one = builder
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    pending = one.start(Started(flow=1, arrival_ns=0, endpoint=CHAT, body=json.dumps(body).encode()))

    rows = [
        one.end(pending, Ended(flow=1, arrival_ns=0, endpoint=CHAT, facts=ExchangeFacts(usage=Usage(prompt_tokens=count)))).row
        for count in (999, pending.tokens)
    ]

    assert rows[0]["input_tokens"] == 999
    assert json.loads(str(rows[0]["source_extra"])) == {"tokenizer_input_tokens": pending.tokens}
    assert "source_extra" not in rows[1]
