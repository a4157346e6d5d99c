"""What the GPUs did in a point's steady window. Pure."""

from collections.abc import Sequence

from replay.judge.metrics import is_within, percentiles
from replay.judge.summary import Gpu, Percentiles
from replay.outcome import Sample


def gpu(samples: Sequence[Sample], window_s: tuple[float, float], output_tokens_per_s: float) -> Gpu | None:
    """None where no GPU was read.

    Power: growth of the energy counters / time, where two samples have them; else the mean of the readings. Energy per output
    token: power / output tokens per second, of all GPUs that were read, idle ones too.
    """
    steady = [one for one in samples if is_within(one.t_ns, window_s)]
    counts = _gauge(steady, "gpu_count")
    if counts is None:
        return None
    power = _gauge(steady, "gpu_power_w")
    power_w = _power_by_energy(steady)
    if power_w is None and power is not None:
        power_w = power.mean
    temperature = _gauge(steady, "gpu_temperature_c")
    used = [
        one.gpu_memory_used_bytes / (one.gpu_memory_used_bytes + one.gpu_memory_free_bytes)
        for one in steady
        if one.gpu_memory_used_bytes and one.gpu_memory_free_bytes is not None
    ]
    return Gpu(
        count=round(counts.max),
        busy=_gauge(steady, "gpu_busy"),
        sm_active=_gauge(steady, "gpu_sm_active"),
        tensor_active=_gauge(steady, "gpu_tensor_active"),
        memory_active=_gauge(steady, "gpu_memory_active"),
        memory_busy=_gauge(steady, "gpu_memory_busy"),
        memory_used_share_max=max(used, default=None),
        clock_mhz=_gauge(steady, "gpu_clock_mhz"),
        temperature_max_c=temperature.max if temperature else None,
        power_w=power_w,
        power_max_w=power.max if power else None,
        energy_per_output_token_j=power_w / output_tokens_per_s if power_w is not None and output_tokens_per_s > 0 else None,
    )


def _gauge(samples: Sequence[Sample], name: str) -> Percentiles | None:
    return percentiles(value for one in samples if (value := getattr(one, name)) is not None)


def _power_by_energy(samples: Sequence[Sample]) -> float | None:
    """DCGM reads its counters once in some seconds, so the ends are the first and last samples that show a new value."""
    seen = [(one.t_ns / 1e9, one.gpu_energy_j) for one in samples if one.gpu_energy_j is not None]
    steps = [after for before, after in zip(seen, seen[1:], strict=False) if after[1] > before[1]]
    if len(steps) < 2:
        return None
    (start_s, start_j), (end_s, end_j) = steps[0], steps[-1]
    return (end_j - start_j) / (end_s - start_s)
