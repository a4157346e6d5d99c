"""`chatreel generate`: flags to the synthesizer's own words, and its report to lines."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from synth.dialing import Wishes
from synth.dials import Dial, Length
from synth.generating import GenerateReport, generate_from, generate_from_model, generate_trace, holds_rows
from synth.model import checked_distribution, load_workload
from tracer.errors import TraceError

NO_DIAL = {
    "preset": "it already says what to draw",
    "system_prompts": "how many shared beginnings there are is learned; --prefix-share and --hit-rate set how long they are",
    "system_prompt_tokens": "shared beginnings are learned; --prefix-share and --hit-rate set how long they are",
    "zipf": "how often each shared beginning is used is learned",
    "documents": "it tells no documents from other shared beginnings",
    "depth": "it tells no documents from other shared beginnings",
    "messages_per_request": "it does not know where a user's message begins in a prompt",
    "diurnal": "the rate of every minute is learned",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    spec: Path | None = None
    preset: str | None = None
    from_trace: Path | None = None
    requests: int | None = None
    duration_s: float | None = None
    rate_per_s: float | None = None
    burstiness: str | None = None  # a CV; of a model also x2
    system_prompts: int | None = None
    system_prompt_tokens: int | None = None
    zipf: float | None = None
    turns: str | None = None  # a mean; of a model also x2
    think: str | None = None  # likewise, in seconds
    documents: int | None = None
    depth: int | None = None
    messages_per_request: int | None = None
    users: float | None = None
    diurnal: str | None = None  # 0.5@24h
    input_tokens: str | None = None  # 120, or 120:3000 for p50:p99; of a model also x2
    output_tokens: str | None = None
    prefix_share: float | None = None
    hit_rate: str | None = None  # 0.6@400k


def run_generate(options: GenerateOptions, seed: int, out_path: Path) -> Iterator[str]:
    yield f"seed {seed}"
    if options.from_trace:
        report = _like(options.from_trace, options, seed, out_path)
    elif options.spec is not None and holds_rows(options.spec):
        report = _like(options.spec, replace(options, spec=None), seed, out_path)
    elif options.spec is not None and options.spec.suffix == ".json":
        report = generate_from_model(options.spec, out_path, seed, wishes_of(options))
    else:
        report = _from_workload(options, seed, out_path)
    yield f"{report.requests:,} requests in {report.sessions:,} sessions over {report.span_s:.0f} s -> {report.path}"
    yield f"{report.input_tokens:,} prompt tokens, {report.output_tokens:,} answer tokens"
    if report.prefix_share is not None:
        wanted = f" (wanted {report.prefix_share_target:.1%})" if report.prefix_share_target is not None else ""
        yield f"an endless prefix cache would serve {report.prefix_share:.1%} of the prompt tokens{wanted}"
    yield from report.notes


def _from_workload(options: GenerateOptions, seed: int, out_path: Path) -> GenerateReport:
    hit_rate, at_tokens = (None, None) if options.hit_rate is None else parse_hit_rate(options.hit_rate)
    amplitude, period_s = (None, None) if options.diurnal is None else parse_diurnal(options.diurnal)
    workload = load_workload(
        options.spec,
        preset=options.preset or (None if options.spec else "chat"),
        overrides={
            "requests": options.requests,
            "duration_s": options.duration_s,
            "arrivals.requests_per_s": options.rate_per_s,
            "arrivals.process": None if options.burstiness is None else "gamma",
            "arrivals.cv": _number("--burstiness", options.burstiness),
            "system_prompts.count": options.system_prompts,
            "system_prompts.tokens": options.system_prompt_tokens,
            "system_prompts.zipf": options.zipf,
            "turns": _mean(_number("--turns", options.turns)),
            "think_s": _mean(_number("--think", options.think)),
            "documents.count": options.documents,
            "documents.per_session": options.depth,
            "messages_per_request": options.messages_per_request,
            "arrivals.users": options.users,
            "arrivals.diurnal_amplitude": amplitude,
            "arrivals.diurnal_period_s": period_s,
            "input_tokens": parse_lengths("--input-tokens", options.input_tokens),
            "output_tokens": parse_lengths("--output-tokens", options.output_tokens),
            "prefix_share": options.prefix_share,
            "hit_rate": hit_rate,
            "hit_rate_at_tokens": at_tokens,
        },
    )
    return generate_trace(workload, seed, out_path)


def parse_hit_rate(text: str) -> tuple[float, int]:
    """0.6@400k -> (0.6, 400_000)."""
    found = re.fullmatch(r"(\d*\.?\d+)@(\d*\.?\d+)([kKmM]?)", text.replace("_", "").replace(",", ""))
    if found is None:
        raise TraceError("wrong value for `--hit-rate`", seen=text, wanted="a rate at a KV size in tokens, as in 0.6@400k")
    return float(found[1]), round(float(found[2]) * {"": 1, "k": 1_000, "m": 1_000_000}[found[3].lower()])


def parse_diurnal(text: str) -> tuple[float, float]:
    """0.5@24h -> (0.5, 86400.0); the period is a day if none is given."""
    found = re.fullmatch(r"(\d*\.?\d+)(?:@(\d*\.?\d+)([smhd]?))?", text)
    if found is None:
        raise TraceError("wrong value for `--diurnal`", seen=text, wanted="an amplitude from 0 to 1 and a period, as in 0.5@24h")
    unit_s = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}[found[3] or ""]
    return float(found[1]), 86_400.0 if found[2] is None else float(found[2]) * unit_s


def parse_lengths(option: str, text: str | None) -> dict[str, float] | None:
    """120 -> always 120; 120:3000 -> lognormal with this p50 and p99."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if found is None:
        wanted = "a number of tokens, or p50:p99 as in 120:3000" + ("; x2 is for fitted models" if text.startswith("x") else "")
        raise TraceError(f"wrong value for `{option}`", seen=text, wanted=wanted)
    return {"constant": int(found[1])} if found[2] is None else {"p50": int(found[1]), "p99": int(found[2])}


def parse_dial(option: str, text: str | None) -> Dial | None:
    """2.5 -> this value; x2.5 -> so many times what the model has."""
    if text is None:
        return None
    found = re.fullmatch(r"(x?)(\d*\.?\d+)", text)
    if found is None:
        raise TraceError(f"wrong value for `{option}`", seen=text, wanted="a number, or a factor as in x2")
    return Dial(value=float(found[2]), is_factor=bool(found[1]))


def wishes_of(options: GenerateOptions) -> Wishes:
    """What a fitted model is asked for; what it has no dial for is refused with the reason."""
    for name, reason in NO_DIAL.items():
        if getattr(options, name) is not None:
            option = "--" + name.replace("_", "-")
            raise TraceError(f"{option} is no dial of a fitted model", seen=reason, next_step="Leave it out, or use a preset")
    hit_rate, at_tokens = (None, None) if options.hit_rate is None else parse_hit_rate(options.hit_rate)
    return Wishes(
        requests=options.requests,
        requests_per_s=options.rate_per_s,
        users=options.users,
        duration_s=options.duration_s,
        burstiness=parse_dial("--burstiness", options.burstiness),
        turns=parse_dial("--turns", options.turns),
        think_s=parse_dial("--think", options.think),
        input_tokens=_length("--input-tokens", options.input_tokens),
        output_tokens=_length("--output-tokens", options.output_tokens),
        prefix_share=options.prefix_share,
        hit_rate=hit_rate,
        hit_rate_at_tokens=at_tokens,
    )


def _length(option: str, text: str | None) -> Length | None:
    if text is not None and text.startswith("x"):
        dial = parse_dial(option, text)
        return None if dial is None else Length(factor=dial.value)
    table = parse_lengths(option, text)
    return None if table is None else Length(law=checked_distribution(option, table, least=1))


def _number(option: str, text: str | None) -> float | None:
    dial = parse_dial(option, text)
    if dial is not None and dial.is_factor:
        raise TraceError(f"wrong value for `{option}`", seen=text, wanted="a number; factors are for fitted models")
    return None if dial is None else dial.value


def _mean(value: float | None) -> dict[str, float] | None:
    return None if value is None else {"mean": value}


def _like(source: Path, options: GenerateOptions, seed: int, out_path: Path) -> GenerateReport:
    """Lengths, turns and sharing are those of the trace: flags that would change them are refused."""
    amount = {"from_trace", "requests", "duration_s", "rate_per_s"}
    given = [one.name for one in fields(options) if one.name not in amount and getattr(options, one.name) is not None]
    if given:
        raise TraceError(
            f"everything but the amount is drawn from {source.name}",
            seen=", ".join(given),
            wanted="only --requests, --rate and --duration beside it",
            next_step="A model that `chatreel fit` learns from the trace without --bootstrap has dials",
        )
    return generate_from(
        source,
        out_path,
        seed,
        requests=options.requests,
        requests_per_s=options.rate_per_s,
        duration_s=options.duration_s,
    )
