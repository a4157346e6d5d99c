"""The scripted upstream is shared: one server for all recorder tests of a module."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


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
