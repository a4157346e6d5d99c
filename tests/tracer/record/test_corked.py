"""Writes of one event leave together, in order, and none stays behind."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tracer.record.corked import corked


async def exchange(act: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> list[bytes]:
    """What a client reads, send by send, from a server that does `act`."""
    sends: list[bytes] = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        original = writer.transport.write
        writer.transport.write = lambda data: (sends.append(bytes(data)), original(data))[1]  # type: ignore[method-assign]
        await act(writer)

    server = await asyncio.start_server(corked(on_connection), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        received = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    assert received == b"".join(sends)
    return sends


async def ends_with_drain(writer: asyncio.StreamWriter) -> None:
    writer.writelines([b"a", b"b", b"c"])
    await writer.drain()
    writer.write(b"d")
    await writer.drain()
    writer.close()


async def waits_a_round(writer: asyncio.StreamWriter) -> None:
    writer.write(b"a")
    writer.write(b"b")
    await asyncio.sleep(0.01)
    writer.write(b"c")
    writer.close()


async def ends_with_eof(writer: asyncio.StreamWriter) -> None:
    writer.write(b"a")
    writer.write_eof()
    writer.close()


@pytest.mark.parametrize(
    ("act", "sends"),
    [(ends_with_drain, [b"abc", b"d"]), (waits_a_round, [b"ab", b"c"]), (ends_with_eof, [b"a"])],
)
def test_what_one_event_wrote_is_one_send(act: Callable[[asyncio.StreamWriter], Awaitable[None]], sends: list[bytes]) -> None:
    assert asyncio.run(exchange(act)) == sends
