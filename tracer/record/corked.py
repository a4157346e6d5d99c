"""A stream writer that sends what one event of the loop wrote in one call: a read of forty chunks is one send, not forty."""

import asyncio
from collections.abc import Buffer, Callable, Iterable
from typing import Any

OnConnection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


class CorkedWriter(asyncio.StreamWriter):
    """Holds bytes back until `drain`, the end of the stream, or the loop's next round, whichever comes first."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        super().__init__(transport, transport.get_protocol(), reader, asyncio.get_running_loop())
        self._held: list[bytes] = []

    def write(self, data: Buffer) -> None:
        if not self._held:
            asyncio.get_running_loop().call_soon(self._send)
        self._held.append(bytes(data))

    def writelines(self, data: Iterable[Buffer]) -> None:
        for one in data:
            self.write(one)

    def _send(self) -> None:
        if self._held:
            held, self._held = self._held, []
            super().write(held[0] if len(held) == 1 else b"".join(held))

    async def drain(self) -> None:
        self._send()
        await super().drain()

    def write_eof(self) -> None:
        self._send()
        super().write_eof()

    def close(self) -> None:
        self._send()
        super().close()


def corked(on_connection: OnConnection) -> OnConnection:
    """`on_connection` as asyncio.start_server wants it, with a corked writer."""
    return lambda reader, writer: on_connection(reader, CorkedWriter(reader, writer))
