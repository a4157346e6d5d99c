"""Learn a workload from a trace, write a new one, prove that it is like the first.

    workload (TOML, preset, flags) -> model -> sessions -> generate -> trace file
    recorded trace                 -> bootstrap             -> trace file
    two traces                     -> fidelity              -> numbers

Everything is pure but `generating.py`, which reads and writes trace files. Randomness is one seed, split by concern.
"""
