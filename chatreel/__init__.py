"""The one command. Only here do recorder, synthesizer and replayer meet; each also works from Python by itself."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("chatreel")
except PackageNotFoundError:  # run from a folder that was never installed
    __version__ = "0+unknown"

PRODUCER = f"chatreel {__version__}"
