"""Arguments and options that several commands take."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class By(StrEnum):
    users = "users"
    time = "time"


TRACE = Annotated[Path, typer.Argument(help="A trace file (Parquet) made by chatreel.", show_default=False)]
OUT = Annotated[Path, typer.Option("--out", "-o", help="Where to write.")]
SEED = Annotated[int, typer.Option(help="Same seed, same bytes.")]
SLO = Annotated[list[str] | None, typer.Option(help="METRIC:MS with ttft, tpot or e2e; may be repeated.")]
ATTAIN = Annotated[float, typer.Option(help="Share of requests that must meet every SLO.")]
BY = Annotated[By, typer.Option(help="users: more sharing groups. time: shorter gaps.")]


def numbers[Number: (int, float)](text: str, kind: type[Number], option: str) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 1,2,5", param_hint=option) from error
