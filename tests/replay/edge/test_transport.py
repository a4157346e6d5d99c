"""Both transports below httpx's own API, and what the own one adds: pooling, TLS that is verified, requests without a task."""

import asyncio
import datetime
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from replay.edge.client import TransportName, client_for
from replay.edge.transport import Transport

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
BOTH = pytest.mark.parametrize("transport", ["own", "httpx"])


async def echoes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers every request on a connection with its own head and body."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
            body = await reader.readexactly(sum(lengths))
            said = b"" if head.startswith(b"HEAD") else head + body
            writer.write(b"HTTP/1.1 200 OK\r\nX-Twice: 1\r\nX-Twice: 2\r\nContent-Length: %d\r\n\r\n" % len(head + body) + said)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def run(use: Callable[[str], Awaitable[None]], serve: Serve = echoes, tls: ssl.SSLContext | None = None) -> None:
    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        async with server:
            await use(f"{'https' if tls else 'http'}://localhost:{server.sockets[0].getsockname()[1]}")

    asyncio.run(main())


@BOTH
def test_httpx_requests_go_out_as_httpx_means_them(transport: TransportName) -> None:
    async def use(url: str) -> None:
        async with client_for(5.0, {"Authorization": "Bearer k"}, transport) as client:
            got = await client.http.post(f"{url}/a/b?x=1", json={"n": 1})
            assert got.text.startswith("POST /a/b?x=1 HTTP/1.1\r\n")
            assert '{"n":1}' in got.text and "authorization: bearer k" in got.text.lower()
            assert got.headers.get_list("x-twice") == ["1", "2"]
            assert (await client.http.get(url)).text.startswith("GET / HTTP/1.1")
            assert (await client.http.head(url)).status_code == 200

    run(use)


@BOTH
def test_a_stream_is_read_as_it_comes(transport: TransportName) -> None:
    go_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await go_on.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        writer.close()

    async def use(url: str) -> None:
        async with client_for(5.0, {}, transport) as client, client.http.stream("GET", url) as response:
            parts = response.aiter_raw()
            assert await anext(parts) == b"one"
            go_on.set()
            assert await anext(parts) == b"two"
            with pytest.raises(StopAsyncIteration):
                await anext(parts)

    run(use, serve)


@BOTH
@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"nonsense\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nfour", httpx.RemoteProtocolError),
        (None, httpx.ReadTimeout),
    ],
)
def test_faults_are_httpx_errors(transport: TransportName, said: bytes | None, error: type[Exception]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if said is None:
            await asyncio.sleep(1)
        else:
            writer.write(said)
        writer.close()

    async def use(url: str) -> None:
        async with client_for(0.2, {}, transport) as client:
            with pytest.raises(error):
                await client.http.get(url)

    run(use, serve)


@pytest.fixture
def authority(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """A CA of our own that signed itself for localhost: (its PEM file, what a server serves with)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = tmp_path / "ca.pem"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "key.pem").write_bytes(secret)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(pem, tmp_path / "key.pem")
    return pem, serving


@BOTH
def test_tls_is_verified(
    transport: TransportName, authority: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    pem, serving = authority

    async def use(url: str) -> None:
        async with client_for(5.0, {}, transport) as client:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await client.http.get(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        async with client_for(5.0, {}, transport) as client:
            assert (await client.http.get(url)).status_code == 200
            assert (await client.http.get(url)).status_code == 200
            with pytest.raises(httpx.ConnectError):  # the certificate is for localhost
                await client.http.get(url.replace("localhost", "127.0.0.1"))

    run(use, tls=serving)


def test_connections_opened_ahead_are_those_that_are_used() -> None:
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await echoes(reader, writer)

    async def use(url: str) -> None:
        async with client_for(5.0, {}) as client:
            endpoint = client.endpoint(url)
            client.reserve(endpoint, 12)
            client.reserve(endpoint, 20)
            await asyncio.sleep(0.1)
            assert opened == 20
            await asyncio.gather(*(client.exchange(endpoint, b"{}") for _ in range(20)))
            assert opened == 20
            await asyncio.sleep(0.01)
            await asyncio.gather(*(client.exchange(endpoint, b"{}") for _ in range(25)))
            assert opened == 25
            for _ in range(5):  # this server keeps connections, as is known now: no need to wait
                await asyncio.gather(*(client.exchange(endpoint, b"{}") for _ in range(25)))
            assert opened == 25

    run(use, serve)


def test_a_server_that_closes_a_moment_after_its_answer_is_not_asked_on_that_connection() -> None:
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await reader.readuntil(b"{}")
        requests += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        for _ in range(3):  # rounds of the loop: the client has sent its next request by then
            await asyncio.sleep(0)
        writer.close()

    async def use(url: str) -> None:
        async with client_for(5.0, {}) as client:
            endpoint = client.endpoint(url)
            for _ in range(30):
                assert (await client.exchange(endpoint, b"{}")).http_status == 200
                if requests % 10 == 0:
                    await asyncio.sleep(0.01)

    run(use, serve)
    assert requests == 30


def test_a_close_that_the_loop_has_not_read_yet_is_seen_before_a_byte_is_sent() -> None:
    """The server closes while the client's loop is busy: the socket knows, the protocol does not."""
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await reader.readuntil(b"\r\n\r\n")
        requests += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.transport.abort()  # closes the socket in the loop's next round, after the client has read the answer

    async def use(url: str) -> None:
        async with httpx.AsyncClient(transport=Transport(), timeout=5) as client:
            for _ in range(20):
                assert (await client.get(url)).text == "ok"

    run(use, serve)
    assert requests == 20


@BOTH
def test_leaving_ends_what_is_open(transport: TransportName) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def use(url: str) -> None:
        async with client_for(5.0, {}, transport) as client:
            asked = asyncio.ensure_future(client.exchange(client.endpoint(url), b"{}"))
            await asyncio.sleep(0.05)
        seen = await asyncio.wait_for(asked, 1)
        assert seen.error_kind == "connection_lost"

    run(use, serve)
