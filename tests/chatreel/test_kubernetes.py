"""The Job in the pages starts as many hosts as their shards say, with a command that the command line takes."""

import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from chatreel.cli import app
from chatreel.replaying import parse_shard, parse_start

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
JOB = Path(__file__).resolve().parents[2] / "docs" / "kubernetes-job.yaml"


def test_every_pod_of_the_job_sends_its_shard() -> None:
    job = yaml.safe_load(JOB.read_text())
    spec, (container,) = job["spec"], job["spec"]["template"]["spec"]["containers"]

    for index in range(spec["completions"]):
        line = container["args"][0].replace("${JOB_COMPLETION_INDEX}", str(index))
        for variable in container["env"]:
            line = line.replace(f"${{{variable['name']}}}", variable["value"])
        program, name, *arguments = shlex.split(line)
        context = get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]

        assert program == "chatreel" and "$" not in line
        shard = parse_shard(context.params["shard"])
        assert (shard.index, shard.count) == (index, spec["completions"])
        assert parse_start(context.params["start_at"]) is not None
        assert context.params["scale"] == "2"
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"] and spec["backoffLimit"] == 0
    mounts = {one["name"] for one in container["volumeMounts"]}
    assert mounts == {one["name"] for one in spec["template"]["spec"]["volumes"]}
