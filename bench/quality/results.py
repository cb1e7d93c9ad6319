"""Results of a comparison: a row for each quantized model, printed as a table and written as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.quality.divergence import Divergence
from torch_armllm.evaluation.paired_tests import Estimate

HEADER = ("", "bits", "file", "KL", "perplexity", "ratio", "same first")


@dataclass(frozen=True)
class Row:
    """A quantized model's accuracy.

    Attributes:
        name: the row's name.
        series: what is varied along a line of rows: ``ours, mse`` or ``llama.cpp, imatrix``.
        bits: bits per weight of the linear layers, without the output head; None: as in another row.
        file: bits per weight of the whole file or of the model in memory.
        kl: nats per token.
        perplexity, ratio: of the texts, and over that of the float model.
        agreement: share of tokens with the same most likely successor.
    """

    name: str
    series: str
    bits: float | None
    file: float | None
    kl: Estimate
    perplexity: Estimate
    ratio: Estimate
    agreement: Estimate

    @classmethod
    def of(
        cls, name: str, series: str, bits: float | None, file: float | None, divergence: Divergence
    ) -> Row:
        """Returns the row of a divergence."""
        figures = divergence.kl, divergence.perplexity, divergence.ratio, divergence.agreement
        return cls(name, series, bits, file, *figures)

    def line(self) -> str:
        """Returns the row of the Markdown table."""
        cells = (
            self.name,
            "" if self.bits is None else f"{self.bits:.2f}",
            "" if self.file is None else f"{self.file:.2f}",
            _shown(self.kl, 4),
            f"{self.perplexity.value:.3f}",
            _shown(self.ratio, 3),
            _shown(Estimate(100 * self.agreement.value, 100 * self.agreement.stderr), 1) + " %",
        )
        return "| " + " | ".join(cells) + " |"


def _shown(estimate: Estimate, digits: int) -> str:
    value = f"{estimate.value:.{digits}f}"
    return value if math.isnan(estimate.stderr) else f"{value} ± {estimate.stderr:.{digits}f}"


@dataclass
class Results:
    """Rows for one float model and one set of texts.

    Attributes:
        model: the float model's name.
        texts, tokens: number of texts, and of tokens in all of them.
        calibration: number of calibration texts.
        file: JSON file that is written after every row; None: none.
    """

    model: str
    texts: int
    tokens: int
    calibration: int
    file: Path | None = None
    rows: list[Row] = field(default_factory=list)

    def begin(self) -> None:
        """Prints the table's header."""
        print("| " + " | ".join(HEADER) + " |\n" + "|---" * len(HEADER) + "|", flush=True)

    def add(self, row: Row) -> None:
        """Prints a row, and writes the file with it."""
        self.rows.append(row)
        print(row.line(), flush=True)
        if self.file is not None:
            self.file.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as JSON types; a standard error that is not known is null."""
        named = {name: getattr(self, name) for name in ("model", "texts", "tokens", "calibration")}
        return named | {"rows": [_to_dict(row) for row in self.rows]}


def read(file: Path) -> Results:
    """Returns the results that a comparison wrote.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        data = json.loads(file.read_text())
        rows = [Row(**{name: _read(value) for name, value in row.items()}) for row in data.pop("rows")]
        return Results(**data, rows=rows)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{file} is not a file of `python -m bench.quality_peers --json`: {error}"
        ) from error


def _to_dict(row: Row) -> dict[str, Any]:
    return {
        name: {"value": value.value, "stderr": None if math.isnan(value.stderr) else value.stderr}
        if isinstance(value, Estimate)
        else value
        for name, value in asdict(row).items()
    }


def _read(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return Estimate(value["value"], math.nan if value["stderr"] is None else value["stderr"])
