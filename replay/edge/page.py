"""One page over HTTP on loopback, in the loop that sends: a thread would hold the interpreter for up to 5 ms at a time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from replay.errors import PlanError

LONGEST_HEAD = 16_384
TIMEOUT_S = 5.0


@contextlib.asynccontextmanager
async def served(port: int, content_type: str, render: Callable[[], str]) -> AsyncIterator[str]:
    """Gives its URL. Port 0 takes any free one. Raises PlanError where it cannot listen."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1] if head.startswith(b"GET ") else b""
                found = path.partition(b"?")[0] in (b"/", b"/metrics")
                body = render().encode() if found else b"see /metrics\n"
                status = "200 OK" if found else "404 Not Found"
                kind = content_type if found else "text/plain"
                fields = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close"
                writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, "127.0.0.1", port, limit=LONGEST_HEAD)
    except (OSError, OverflowError) as error:
        raise PlanError(
            "cannot serve metrics here", seen=f"127.0.0.1:{port}", next_step="Choose another --serve-metrics port"
        ) from error
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
    finally:
        server.close()
