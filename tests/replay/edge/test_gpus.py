"""GPUs by a DCGM exporter's page and by NVML come out under the same names; nothing is read that was not asked for."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from replay.edge.client import client_for
from replay.edge.engines import joint, read_metrics
from replay.edge.nvml import Nvml
from replay.edge.scrape import Scraper
from replay.errors import PlanError


def dcgm(gpus: int, energy_mj: float = 1e6) -> str:
    """As dcgm-exporter 4 writes it, a line a GPU."""
    figures = {
        "DCGM_FI_DEV_SM_CLOCK": 1980,
        "DCGM_FI_DEV_GPU_TEMP": 50,
        "DCGM_FI_DEV_POWER_USAGE": 400.5,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": energy_mj,
        "DCGM_FI_DEV_GPU_UTIL": 80,
        "DCGM_FI_DEV_MEM_COPY_UTIL": 40,
        "DCGM_FI_DEV_FB_FREE": 20_000,
        "DCGM_FI_DEV_FB_USED": 60_000,
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.7,
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.25,
        "DCGM_FI_PROF_DRAM_ACTIVE": 0.5,
        "DCGM_FI_DEV_XID_ERRORS": 0,
    }
    lines = []
    for name, value in figures.items():
        lines += [f"# HELP {name} Words (in units).", f"# TYPE {name} gauge"]
        for number in range(gpus):
            labels = f'gpu="{number}",UUID="GPU-{number}",modelName="NVIDIA H100 80GB HBM3",Hostname="n1"'
            lines.append(f"{name}{{{labels}}} {value + number if 'TEMP' in name else value}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def exporter() -> Iterator[tuple[str, list[str]]]:
    """(URL, pages that it gives, one a reading)."""
    pages: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (pages.pop(0) if len(pages) > 1 else pages[0]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics", pages
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_dcgm_page_is_read_under_our_names(exporter: tuple[str, list[str]]) -> None:
    url, pages = exporter
    pages += [dcgm(2), dcgm(2, energy_mj=1e6 + 5_000)]

    async def read() -> list[dict[str, float]]:
        async with client_for(5, {}) as client:
            scraper = Scraper(client.http, [url])
            return [(await scraper.read()).values for _ in range(2)]

    first, second = asyncio.run(read())

    assert first["gpu_energy_j"] == 0 and second["gpu_energy_j"] == pytest.approx(10)
    assert {name: value for name, value in second.items() if name != "gpu_energy_j"} == pytest.approx(
        {
            "gpu_count": 2,
            "gpu_busy": 0.8,
            "gpu_engine_active": 0.7,
            "gpu_tensor_active": 0.25,
            "gpu_memory_active": 0.5,
            "gpu_memory_busy": 0.4,
            "gpu_memory_used_bytes": 2 * 60_000 * 2**20,
            "gpu_memory_free_bytes": 2 * 20_000 * 2**20,
            "gpu_power_w": 801,
            "gpu_clock_mhz": 1980,
            "gpu_temperature_c": 51,
        }
    )


def test_machines_are_joined_by_how_many_gpus_they_have() -> None:
    found = joint(
        [read_metrics(dcgm(1).replace(" 80\n", " 20\n")), read_metrics(dcgm(3)), read_metrics("vllm:num_requests_running 2\n")]
    )

    assert (found["gpu_count"], found["running"]) == (4, 2)
    assert found["gpu_busy"] == pytest.approx((0.2 + 3 * 0.8) / 4)
    assert found["gpu_power_w"] == pytest.approx(4 * 400.5)


def test_a_page_of_gpus_alone_is_no_page_of_a_server() -> None:
    assert read_metrics(dcgm(1)).is_of_gpus
    assert not read_metrics(dcgm(1) + "vllm:num_requests_running 2\n").is_of_gpus


class Failure(Exception):
    """NVMLError."""


def fake_nvml(**changes: Any) -> ModuleType:
    def no_energy(_gpu: int) -> int:
        raise Failure("Not Supported")

    api = {
        "NVMLError": Failure,
        "NVML_CLOCK_SM": 1,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=90 + gpu, memory=30),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=100, used=75, free=25),
        "nvmlDeviceGetPowerUsage": lambda gpu: 300_000 + gpu,
        "nvmlDeviceGetClockInfo": lambda _gpu, _kind: 1500,
        "nvmlDeviceGetTemperature": lambda gpu, _kind: 60 + gpu,
        "nvmlDeviceGetTotalEnergyConsumption": no_energy,
    }
    module = ModuleType("pynvml")
    vars(module).update(api | changes)
    return module


def test_nvml_gives_the_same_names_and_leaves_out_what_a_gpu_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())

    async def read() -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        async with client_for(5, {}) as client:
            seen = await Scraper(client.http, [], Nvml("nvml:0,2")).read()
            return seen.values, seen.servers

    values, servers = asyncio.run(read())

    assert values["gpu_count"] == 2 and values["gpu_busy"] == pytest.approx(0.91)
    assert values["gpu_power_w"] == pytest.approx(600.002) and values["gpu_temperature_c"] == 62
    assert "gpu_energy_j" not in values and servers == {}


def failing(error: str) -> Any:
    def fail() -> None:
        raise Failure(error)

    return fail


@pytest.mark.parametrize(
    ("module", "which", "words"),
    [
        (None, "nvml", r"chatreel\[gpu\]"),
        (fake_nvml(nvmlInit=failing("Driver Not Loaded")), "nvml", "Driver Not Loaded"),
        (fake_nvml(), "nvml:3", "numbers below 3"),
        (fake_nvml(), "rocm", "numbers below 3"),
    ],
)
def test_who_asks_for_gpus_that_cannot_be_read_is_told(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, which: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)

    with pytest.raises(PlanError, match=words):
        Nvml(which)
