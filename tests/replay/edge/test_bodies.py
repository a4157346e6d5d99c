"""A request of each API asks for the same prompt and the same length, and is understood by the recorder's own reader."""

import msgspec
import numpy as np
import pytest

from replay.edge.bodies import PATHS, api_of, body_of, streamed
from tracer.words import Vocabulary

WORDS = np.array([b" one", b" two", b" six"], dtype="S4")
VOCABULARY = Vocabulary(ids=np.array([11, 22, 66]), words=WORDS)


@pytest.mark.parametrize("mode", ["text", "chat", "responses", "messages"])
def test_a_text_prompt_and_its_length_are_read_back_by_the_apis_own_parser(mode: str) -> None:
    body = body_of(mode, "m", np.array([1, 0, 2]), VOCABULARY, 40, **streamed(mode, 40))

    asked = api_of(mode).parse_request(body)

    said = asked.prompt if mode == "text" else asked.messages[0]["content"] if asked.messages else None
    assert (said, asked.output_limit, asked.stream, asked.model) == (" two one six", 40, True, "m")


def test_token_ids_go_out_as_they_are() -> None:
    body = msgspec.json.decode(body_of("ids", "m", np.array([22, 66]), VOCABULARY, 3, **streamed("ids", 3)))

    assert body["prompt"] == [22, 66]
    assert body["max_tokens"] == body["min_tokens"] == 3
    assert PATHS["ids"] == "/v1/completions"
