"""Run folders of several hosts, each with its shard of one plan, joined into one run folder like that of a single host."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from replay.book import write_json
from replay.errors import PlanError
from replay.outcome import Sample
from replay.results import log_path, read_lines

ALIKE = ("target", "router", "model", "prompt_mode", "seed", "by", "limit", "dequantise", "open_loop")
OF_SHARD = ("count", "plan_digest", "start_unix_ns")
STALE_NS = 1_000_000_000  # an older sample of a host says nothing of it any more


def gather(folders: Sequence[Path], run_dir: Path, lost: Mapping[int, str] | None = None) -> list[str]:
    """Returns what to say. Raises PlanError unless the folders are all shards of one plan with one start.

    `lost`: why there is no folder of a shard; the run is then one that was cut short.
    """
    if (run_dir / "run.json").exists():
        raise PlanError("there is a run here already", path=str(run_dir), next_step="Choose another --out")
    found = sorted(((folder, _manifest(folder)) for folder in folders), key=lambda one: int(_shard(one[1])["index"]))
    _check(found, lost or {})
    run_dir.mkdir(parents=True, exist_ok=True)
    manifests = [manifest for _, manifest in found]
    points = min(len(one["points"]) for one in manifests)  # one that not all came to was stopped before it began
    for point in range(points):
        _join_files([folder for folder, _ in found], run_dir, point)
    write_json(run_dir / "run.json", _joined(manifests, points, lost or {}))
    return [f"{_name(one)} of {_shard(one)['host']}: {sum(at['planned'] for at in one['points'])} requests" for one in manifests]


def _join_files(folders: Sequence[Path], run_dir: Path, point: int) -> None:
    number = 0
    for folder in folders:
        for path in sorted(folder.glob(f"point-{point}.outcomes*.*")):
            if path.suffix in (".parquet", ".jsonl"):
                shutil.copyfile(path, log_path(run_dir, point, number).with_suffix(path.suffix))
                number += 1
    name = f"point-{point}.samples.jsonl"
    with open(run_dir / name, "wb") as file:
        for one in together([read_lines(folder / name, Sample)[0] for folder in folders]):
            file.write(msgspec.json.encode(one) + b"\n")


def together(parts: Sequence[Sequence[Sample]]) -> list[Sample]:
    """The servers as the host saw them that sent longest; the clients of all hosts: streams in sum, CPU and loop lag at worst."""
    longest = max(parts, key=lambda part: part[-1].t_ns if part else -1)
    others = [part for part in parts if part is not longest]
    at = [0] * len(others)
    found = []
    for sample in longest:
        seen = [sample]
        for number, part in enumerate(others):
            while at[number] < len(part) and part[at[number]].t_ns <= sample.t_ns:
                at[number] += 1
            last = part[at[number] - 1] if at[number] else None
            if last is not None and sample.t_ns - last.t_ns <= STALE_NS:
                seen.append(last)
        found.append(
            msgspec.structs.replace(
                sample,
                client_in_flight=sum(one.client_in_flight or 0 for one in seen),
                client_cpu_share=max((one.client_cpu_share or 0.0 for one in seen), default=None),
                client_loop_lag_ns=max((one.client_loop_lag_ns or 0 for one in seen), default=None),
            )
        )
    return found


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = msgspec.json.decode((folder / "run.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError) as error:
        raise PlanError(
            "not a run folder", path=str(folder), wanted="run.json in it", next_step="Use the folders of replay --shard"
        ) from error
    if not isinstance(manifest, dict) or not manifest.get("points") or "shard" not in manifest["points"][0]:
        raise PlanError(
            "not a shard of a run", path=str(folder), wanted="the folder of a replay with --shard", next_step="Report it as it is"
        )
    return manifest


def _check(found: Sequence[tuple[Path, dict[str, Any]]], lost: Mapping[int, str]) -> None:
    first_folder, first = found[0]
    for folder, manifest in found[1:]:
        pairs = [(name, first.get(name), manifest.get(name)) for name in ALIKE]
        pairs += [("scale", first["points"][0]["scale"], manifest["points"][0]["scale"])]
        pairs += [(name, _shard(first)[name], _shard(manifest)[name]) for name in OF_SHARD]
        for name, ours, theirs in pairs:
            if ours != theirs:
                raise PlanError(
                    f"these are shards of different runs: {name} differs",
                    seen=f"{ours} in {first_folder}, {theirs} in {folder}",
                    wanted="the same trace, options and --start-at on every host",
                )
    count, given = int(_shard(first)["count"]), [int(_shard(manifest)["index"]) for _, manifest in found]
    missing = [str(index) for index in range(count) if index not in given and index not in lost]
    if missing or len(set(given)) < len(given):
        raise PlanError(
            f"shard {', '.join(missing)} of {count} is missing" if missing else "a shard is given twice",
            seen=f"shards {', '.join(map(str, given))}",
            wanted=f"each of 0 to {count - 1} once",
        )


def _shard(manifest: dict[str, Any]) -> dict[str, Any]:
    shard: dict[str, Any] = manifest["points"][0]["shard"]
    return shard


def _name(manifest: dict[str, Any]) -> str:
    return f"shard {_shard(manifest)['index']}/{_shard(manifest)['count']}"


def _joined(manifests: Sequence[dict[str, Any]], points: int, lost: Mapping[int, str]) -> dict[str, Any]:
    joined = [_joined_point([(_name(one), one["points"][point]) for one in manifests], lost) for point in range(points)]
    notes = dict.fromkeys(note for one in manifests for note in one["notes"] if not note.startswith(_name(one)))
    return manifests[0] | {"notes": list(notes), "points": joined}


def _joined_point(named: Sequence[tuple[str, dict[str, Any]]], lost: Mapping[int, str]) -> dict[str, Any]:
    points = [one for _, one in named]
    planned, shard = sum(one["planned"] for one in points), points[0]["shard"]
    stopped = [f"shard {index}/{shard['count']}: {why}" for index, why in lost.items()]
    stopped += [f"{name}: {one['stopped']}" for name, one in named if one["stopped"]]
    return {name: value for name, value in points[0].items() if name != "shard"} | {
        "planned": shard["planned_by_all"] if lost else planned,
        "later_turns": sum(one["later_turns"] for one in points),
        "servers": [
            of_server[0] | {"planned": sum(one["planned"] for one in of_server)}
            for of_server in zip(*(one["servers"] for one in points), strict=True)
        ],
        "stopped": "; ".join(stopped) or None,
        "shards": [one["shard"] for one in points],
    }
