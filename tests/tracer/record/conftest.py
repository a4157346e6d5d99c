"""The scripted upstream is shared: one server for all recorder tests of a module."""

import importlib.util
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mitmproxy.certs import CertStore


def _load() -> object:
    """Tests are imported by path (importlib mode), so a helper beside them is as well."""
    name = "recorder_upstream"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("upstream.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="module")
def scripts():
    return _load()


@pytest.fixture(scope="module")
def server(scripts) -> Iterator[str]:
    with scripts.upstream() as url:
        yield url


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ssl.SSLContext]:
    """(PEM of a private authority, a server's context with a certificate of it for 127.0.0.1)."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    folder = tmp_path_factory.mktemp("authority")
    store = CertStore.from_store(folder, "private", 2048)
    entry = store.get_cert("127.0.0.1", [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    pem = folder / "server.pem"
    key = entry.privatekey.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    pem.write_bytes(entry.cert.to_pem() + key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    return str(folder / "private-ca-cert.pem"), context
