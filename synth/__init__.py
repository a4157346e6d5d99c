"""Learn a workload from a trace, write a new one, prove that it is like the first.

    workload (TOML, preset, flags) -> model -> sessions -> generate          -> trace file
    recorded trace                 -> bootstrap                              -> trace file
    recorded trace                 -> kept rows (JSON) -> bootstrap          -> trace file
    recorded trace                 -> links -> fit -> learned model (JSON)   -> dialing -> drawing -> naming -> trace file
    two traces                     -> fidelity                               -> numbers
    trace                          -> frame, layout -> text or corpus        -> prompts for any tool

Everything is pure but `generating.py`, which reads and writes trace files, and `frame.py`, which asks a tokenizer.
Randomness is one seed, split by concern.
"""
