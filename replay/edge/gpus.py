"""GPU figures of NVIDIA's DCGM exporter, brought to our names. Pure; NVML gives the same ones, see nvml.py.

Names and units: dcgm-exporter's default-counters.csv. The PROF figures want Volta or later, and some installations leave them
out; what is not told stays absent.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

MIB = 2.0**20

# Our name -> (their name, what theirs is multiplied by, how several GPUs become one figure).
_FIGURES: dict[str, tuple[str, float, Literal["sum", "mean", "max"]]] = {
    "gpu_busy": ("DCGM_FI_DEV_GPU_UTIL", 0.01, "mean"),  # share of time in which any kernel ran
    "gpu_engine_active": ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 1.0, "mean"),
    "gpu_sm_active": ("DCGM_FI_PROF_SM_ACTIVE", 1.0, "mean"),
    "gpu_tensor_active": ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 1.0, "mean"),
    "gpu_memory_active": ("DCGM_FI_PROF_DRAM_ACTIVE", 1.0, "mean"),  # share of cycles in which memory moved data: its bandwidth
    "gpu_memory_busy": ("DCGM_FI_DEV_MEM_COPY_UTIL", 0.01, "mean"),  # share of time in which memory was used at all
    "gpu_memory_used_bytes": ("DCGM_FI_DEV_FB_USED", MIB, "sum"),
    "gpu_memory_free_bytes": ("DCGM_FI_DEV_FB_FREE", MIB, "sum"),
    "gpu_power_w": ("DCGM_FI_DEV_POWER_USAGE", 1.0, "sum"),
    "gpu_clock_mhz": ("DCGM_FI_DEV_SM_CLOCK", 1.0, "mean"),
    "gpu_temperature_c": ("DCGM_FI_DEV_GPU_TEMP", 1.0, "max"),
    "gpu_energy_j": ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1e-3, "sum"),  # a counter, since the driver was loaded
}
GPU_COUNT = "gpu_count"
GPU_COUNTERS = ("gpu_energy_j",)
GPU_GAUGES = (GPU_COUNT, *(name for name in _FIGURES if name not in GPU_COUNTERS))
DCGM_NAMES = frozenset(theirs for theirs, _, _ in _FIGURES.values())


def of_dcgm(totals: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Their names with a value a GPU -> ours. Empty: no GPU is told of."""
    found = {
        ours: [value * factor for value in totals[theirs]] for ours, (theirs, factor, _) in _FIGURES.items() if theirs in totals
    }
    return of_gpus(found)


def of_gpus(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Ours with a value a GPU -> one figure each."""
    if not any(values.values()):
        return {}
    found = {GPU_COUNT: float(max(map(len, values.values())))}
    for name, seen in values.items():
        if seen:
            found[name] = _JOINED[_FIGURES[name][2]](seen, [1.0] * len(seen))
    return found


def joint_gpus(pages: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Several machines as one."""
    found = {}
    for name in (*GPU_GAUGES, *GPU_COUNTERS):
        having = [one for one in pages if name in one]
        if having:
            how = "sum" if name == GPU_COUNT else _FIGURES[name][2]
            found[name] = _JOINED[how]([one[name] for one in having], [one.get(GPU_COUNT, 1.0) for one in having])
    return found


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


_JOINED = {"sum": lambda values, _: sum(values), "max": lambda values, _: max(values), "mean": _mean}
