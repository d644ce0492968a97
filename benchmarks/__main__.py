"""`python -m benchmarks [--section NAME]`: measures, prints the table, and keeps it in benchmarks/results.json.

The targets are those of the design's section 11. A run of one section replaces that section's rows only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.row import Row

SECTIONS = ("probe", "log", "placement", "runner", "prefill", "requests")
RESULTS = Path(__file__).parent / "results.json"


def measure(section: str, console: Console) -> list[Row]:
    """The rows of a section; its module is imported only now, for what it imports costs memory."""
    rows = []
    with console.status(f"measuring {section}"):
        for row in importlib.import_module(f"benchmarks.{section}").rows():
            rows.append(row)
            console.log(f"{row.section}: {row.name}: {row.value:.4g} {row.unit}")
    return rows


def table(rows: list[Row]) -> Table:
    """The rows as people read them."""
    drawn = Table(title=f"Ullage on {os.cpu_count()} cores, {platform.system()} {platform.machine()}")
    for heading in ("section", "what", "value", "floor", "ratio", "target", "holds"):
        drawn.add_column(heading, justify="right" if heading in {"value", "floor", "ratio", "target"} else "left")
    for row in rows:
        drawn.add_row(
            row.section,
            row.name,
            f"{row.value:,.4g} {row.unit}",
            "" if row.floor is None else f"{row.floor:,.4g} ({row.floor_name})",
            "" if row.ratio is None else f"{row.ratio:.3g}",
            f"{'≤' if row.better == 'lower' else '≥'} {row.target:,.4g}",
            "yes" if row.holds else "NO",
        )
    return drawn


def keep(rows: list[Row], sections: tuple[str, ...]) -> None:
    """Write the rows into results.json, leaving those of other sections as they are."""
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    kept = [row for row in kept if row["section"] not in sections]
    RESULTS.write_text(json.dumps({"rows": [*kept, *(row.to_json() for row in rows)]}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=SECTIONS, help="measure one section (default: all)")
    chosen = parser.parse_args().section
    sections = SECTIONS if chosen is None else (chosen,)
    console = Console(stderr=True)
    rows = [row for section in sections for row in measure(section, console)]
    Console(width=150).print(table(rows))
    keep(rows, sections)
    return 0


if __name__ == "__main__":
    sys.exit(main())
