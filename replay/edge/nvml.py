"""The NVIDIA GPUs of this machine, read through NVML (nvidia-ml-py, the extra `gpu`) in a thread beside the loop that sends."""

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

from replay.edge.engines import ServerState
from replay.edge.gpus import of_gpus
from replay.errors import PlanError

NAME = "nvml"


class Nvml:
    """`which`: `nvml` for all GPUs, `nvml:0,2` for these. Raises PlanError where none can be read: who asks for it wants it."""

    def __init__(self, which: str) -> None:
        try:
            self._api: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise PlanError(
                "NVML cannot be read", seen="no module pynvml", next_step="Install the extra: pip install 'chatreel[gpu]'"
            ) from error
        try:
            self._api.nvmlInit()
            count = int(self._api.nvmlDeviceGetCount())
            self._gpus = [self._api.nvmlDeviceGetHandleByIndex(number) for number in _numbers(which, count)]
        except self._api.NVMLError as error:
            raise PlanError(
                "no NVIDIA GPU can be read on this machine",
                seen=str(error),
                next_step="Leave out --gpu; for the server's machine give its DCGM exporter as another --metrics-url",
            ) from error

    async def read(self) -> ServerState | None:
        values = await asyncio.to_thread(self._values)
        return ServerState(values=values, block_tokens=None, kv_capacity_tokens=None) if values else None

    def close(self) -> None:
        self._api.nvmlShutdown()

    def _values(self) -> dict[str, float]:
        api = self._api
        figures: dict[str, Callable[[Any], float]] = {
            "gpu_busy": lambda gpu: api.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "gpu_memory_busy": lambda gpu: api.nvmlDeviceGetUtilizationRates(gpu).memory / 100,
            "gpu_memory_used_bytes": lambda gpu: api.nvmlDeviceGetMemoryInfo(gpu).used,
            "gpu_memory_free_bytes": lambda gpu: api.nvmlDeviceGetMemoryInfo(gpu).free,
            "gpu_power_w": lambda gpu: api.nvmlDeviceGetPowerUsage(gpu) / 1000,  # milliwatts, over a second on new GPUs
            "gpu_clock_mhz": lambda gpu: api.nvmlDeviceGetClockInfo(gpu, api.NVML_CLOCK_SM),
            "gpu_temperature_c": lambda gpu: api.nvmlDeviceGetTemperature(gpu, api.NVML_TEMPERATURE_GPU),
            "gpu_energy_j": lambda gpu: api.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,  # millijoules; Volta and later
        }
        return of_gpus({name: [x for gpu in self._gpus if (x := self._one(of, gpu)) is not None] for name, of in figures.items()})

    def _one(self, of: Callable[[Any], float], gpu: object) -> float | None:
        try:
            return float(of(gpu))
        except self._api.NVMLError:  # not supported by this GPU
            return None


def _numbers(which: str, count: int) -> list[int]:
    name, _, listed = which.partition(":")
    try:
        numbers = [int(part) for part in listed.split(",")] if listed else list(range(count))
        if name != NAME or not numbers or not all(0 <= number < count for number in numbers):
            raise ValueError(which)
    except ValueError as error:
        wanted = f"nvml, or nvml:0,1 with numbers below {count}"
        raise PlanError("no such GPUs", seen=f"--gpu {which}", wanted=wanted) from error
    return numbers
