"""GPU figures of a point: power from energy where it is counted, and what a token takes of it."""

import pytest

from replay.judge.gpu import gpu
from replay.outcome import Sample


def samples(**series: list[float]) -> list[Sample]:
    length = len(next(iter(series.values())))
    return [Sample(t_ns=t * 10**9, gpu_count=2, **{name: seen[t] for name, seen in series.items()}) for t in range(length)]


def test_power_is_the_growth_of_energy_over_time() -> None:
    seen = gpu(samples(gpu_energy_j=[0, 0, 500, 500, 1500, 2000], gpu_power_w=[900.0] * 6), (0, 5), 1000.0)

    assert seen is not None and (seen.count, seen.power_max_w) == (2, 900)
    assert seen.power_w == pytest.approx(500)  # 1500 J from the second at 2 s to that at 5 s
    assert seen.energy_per_output_token_j == pytest.approx(0.5)


def test_without_counted_energy_power_is_the_mean_of_its_readings_in_the_window() -> None:
    seen = gpu(samples(gpu_power_w=[9000, 100, 300, 9000], gpu_busy=[0, 0.5, 0.7, 0]), (1, 2), 50.0)

    assert seen is not None and seen.busy is not None
    assert (seen.power_w, seen.energy_per_output_token_j, seen.busy.max) == (200, 4, 0.7)


def test_no_token_no_energy_per_token_and_no_gpu_no_figures() -> None:
    seen = gpu(samples(gpu_power_w=[100.0, 100.0]), (0, 1), 0.0)

    assert seen is not None and seen.power_w == 100 and seen.energy_per_output_token_j is None
    assert gpu([Sample(t_ns=0, running=3)], (0, 1), 5.0) is None
