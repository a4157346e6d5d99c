"""Work in a process of its own, while requests are sent. A thread would hold up the event loop, and with it every stream."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import cast

NICE = 10  # the sender goes first where cores are few


async def beside[Result](work: Callable[[], Result]) -> Result | None:
    """None: the process died, for want of memory say. `work` is pickled. Cancelling ends it."""
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, work), name="chatreel-beside", daemon=True)
    process.start()
    theirs.close()
    try:
        return cast(Result, await asyncio.to_thread(ours.recv))
    except EOFError:
        return None
    finally:
        process.terminate()
        process.join()


def _answer(pipe: Connection, work: Callable[[], object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group, and the parent decides
    os.nice(NICE)
    pipe.send(work())
