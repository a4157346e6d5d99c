"""The nodes of a Ray cluster that send a replay: an actor each, with the methods of `Node`. Only here is Ray known."""

import contextlib
import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from replay.errors import PlanError
from replay.node import Node
from replay.nodes import Crew

READY_S = 60.0  # until an actor is up: a process is started and this package imported


@contextlib.contextmanager
def ray_crew(address: str, count: int | None, cpus: int) -> Iterator[Crew]:
    """`count`: of shards; None: one a node. Each takes `cpus` of its node for itself. Raises PlanError."""
    ray = _ray()
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # ConnectionError, ValueError, RuntimeError and others of its own
        raise PlanError(
            "no Ray cluster can be reached",
            seen=f"--ray {address}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            wanted="auto or HOST:PORT on a node of the cluster, ray://HOST:10001 from outside",
            next_step="`ray status` on that node says whether it is up",
        ) from error
    try:
        yield _crew(ray, count, cpus)
    finally:
        ray.shutdown()  # and with this program's job, its actors


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise PlanError(
            "--ray needs Ray",
            seen="no module ray",
            next_step="Install the extra here and on every node: pip install 'chatreel[ray]'",
        ) from error


def _crew(ray: Any, count: int | None, cpus: int) -> Crew:
    chosen = places(ray.nodes(), count, cpus)
    on_node = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    remote = ray.remote(Node)
    actors = [
        remote.options(num_cpus=cpus, scheduling_strategy=on_node(one["NodeID"], soft=False), max_restarts=0).remote()
        for one in chosen
    ]
    names = _names(chosen)
    _await(ray, actors, names, cpus)

    def call(number: int, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = getattr(actors[number], method).remote(*arguments).future()
        return future

    return Crew(names=names, call=call, shared=ray.put)


def places(nodes: Sequence[dict[str, Any]], count: int | None, cpus: int) -> list[dict[str, Any]]:
    """The node of each shard: in turn, each as often as its CPUs allow. None: every node that can, once. Raises PlanError."""
    living = [one for one in nodes if one["Alive"]]
    room = [int(one["Resources"].get("CPU", 0) // cpus) for one in living]
    turns = [one for turn in range(max(room, default=0)) for one, times in zip(living, room, strict=True) if times > turn]
    wanted = sum(times > 0 for times in room) if count is None else count
    if not 0 < wanted <= len(turns):
        raise PlanError(
            "the cluster has no room for the shards",
            seen=f"room for {len(turns)} on {len(living)} living nodes",
            wanted=f"room for {max(wanted, 1)} of {cpus} CPUs each, one a process of --workers",
            next_step="Lower --ray-workers or --workers, or add nodes",
        )
    return turns[:wanted]


def _names(chosen: list[dict[str, Any]]) -> list[str]:
    """By host, with its address; two nodes of one host are told apart by the beginning of Ray's id."""
    hosts = Counter(one["NodeManagerHostname"] for one in {one["NodeID"]: one for one in chosen}.values())
    names: list[str] = []
    for one in chosen:
        host, address = one["NodeManagerHostname"], one["NodeManagerAddress"]
        name = f"{host} ({address})" if hosts[host] == 1 else f"{host} ({address}, {one['NodeID'][:6]})"
        names.append(name if name not in names else f"{name} #{len(names)}")
    return names


def _await(ray: Any, actors: list[Any], names: list[str], cpus: int) -> None:
    """All up. Raises PlanError with the first that is not."""
    asked = [actor.now_ns.remote() for actor in actors]
    ray.wait(asked, num_returns=len(asked), timeout=READY_S)
    for name, answer in zip(names, asked, strict=True):
        try:
            ray.get(answer, timeout=0)
        except ray.exceptions.GetTimeoutError as error:
            raise PlanError(
                f"{name} does not come up",
                seen=f"nothing after {READY_S:.0f} s",
                wanted=f"{cpus} free CPUs there for each shard",
                next_step="`ray status` says what is in use; --ray-workers takes fewer",
            ) from error
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise PlanError(
                f"{name} cannot run a shard",
                seen=lines[-1].strip() if lines else type(error).__name__,
                wanted="the same chatreel installed on every node",
                next_step="pip install 'chatreel[ray]' on it",
            ) from error
