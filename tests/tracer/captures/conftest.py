"""The traffic that captures hold is shared by their tests."""

import importlib.util
import sys
from pathlib import Path

import pytest


def _load() -> object:
    """Tests are imported by path (importlib mode), so a module beside them is as well."""
    name = "captured_traffic"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("traffic.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def traffic():
    return _load()
