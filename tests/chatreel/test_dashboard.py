"""The Grafana dashboard is one, and asks for nothing that nobody exposes."""

import json
import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from chatreel.record_metrics import StatsPage
from replay.edge.engines import wanted_lines
from replay.outcome import Sample
from replay.progress import Progress

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "chatreel.json").read_text())
WORDS = {"sum", "rate", "max", "avg", "by", "le", "quantile", "histogram_quantile", "__rate_interval"}
HISTOGRAMS_OF_SERVERS = {"vllm:time_to_first_token_seconds_bucket", "sglang:time_to_first_token_seconds_bucket"}  # their docs


def names_asked_for() -> set[str]:
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return {name for one in targets for name in re.findall(r"[a-zA-Z_][\w:]*", one["expr"])} - WORDS


def names_exposed() -> set[str]:
    registry = CollectorRegistry()
    registry.register(StatsPage())
    client = Progress(scale=1.0, planned=1, predicted_hit_rate=0.5, last_sample=Sample(t_ns=0, client_cpu_share=0.1))
    texts = [generate_latest(registry).decode(), client.openmetrics().replace("# EOF\n", "")]
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    return {one.name for family in families for one in family.samples} | {family.name for family in families}


def test_it_is_a_dashboard() -> None:
    panels = DASHBOARD["panels"]
    assert DASHBOARD["schemaVersion"] >= 36 and DASHBOARD["title"] and DASHBOARD["uid"]
    assert len({one["id"] for one in panels}) == len(panels)
    assert all(one["gridPos"]["x"] + one["gridPos"]["w"] <= 24 for one in panels)
    for panel in panels:
        assert panel["type"] in ("row", "timeseries") and panel["title"]
        targets = panel.get("targets", [])
        assert len({one["refId"] for one in targets}) == len(targets) and (targets or panel["type"] == "row")


def test_every_name_that_it_asks_for_is_exposed_or_known_of_servers() -> None:
    unknown = names_asked_for() - names_exposed() - HISTOGRAMS_OF_SERVERS

    of_servers = {name for name in unknown if wanted_lines(f"{name} 1\n")}
    assert unknown == of_servers
    assert all(name.startswith(("vllm:", "sglang:", "DCGM_")) for name in of_servers)
