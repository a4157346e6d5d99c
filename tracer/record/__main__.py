"""`python -m tracer.record CONFIG_JSON`: one JSON line when ready, one with the result. Used by `start_recorder`.

It stops as on SIGTERM when the process that started it is gone, which the end of stdin tells.
"""

import os
import signal
import sys
import threading
import time

import msgspec

from tracer.errors import TraceError
from tracer.record.recording import record
from tracer.record.session import RecordConfig


def _say(value: object) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


def _stop_when_orphaned(parent: int) -> None:
    while os.read(0, 4096):
        pass
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    threading.Thread(target=_stop_when_orphaned, args=(os.getppid(),), daemon=True).start()
    config = msgspec.json.decode(sys.argv[1], type=RecordConfig)
    try:
        _say(record(config, on_ready=lambda url: _say({"url": url})))
    except TraceError as error:
        _say({"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
