"""Prints docs/architectures.md: which types of models can be split, and why the others cannot.

python -m services.model_folder > docs/architectures.md
"""

from __future__ import annotations

from collections import defaultdict

from services.model_folder.admission import ADMITTED, REFUSED
from services.model_folder.architectures import LAYER_MODULES


def page() -> str:
    """The page, whole."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for model_type, reason in REFUSED.items():
        by_reason[reason].append(model_type)
    refused = sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    lines = [
        "# Which models can be split",
        "",
        "Printed by `python -m services.model_folder`; a test keeps it fresh. Types are config.json's `model_type`.",
        "",
        "| outcome | types |",
        "|---|---|",
        f"| can be split | {len(ADMITTED)} |",
        *(f"| cannot yet: {reason} | {len(types)} |" for reason, types in refused),
        f"| the runtime's types in all | {len(ADMITTED) + len(REFUSED)} |",
        "",
        "## Can be split",
        "",
        "For each of these a small model of random numbers is cut at every layer, given a prompt longer than its",
        "windows in chunks and then further tokens, and gives bit for bit the scores of the whole model; its weights",
        "and its cache take what they were weighed to take.",
        "",
        "Every tensor is checked against config.json: " + ", ".join(sorted(LAYER_MODULES)) + ".",
        "",
        "Weighed by the names of their tensors: " + ", ".join(sorted(set(ADMITTED) - set(LAYER_MODULES))) + ".",
        "",
        "## Cannot be split yet",
        "",
        *(f"- {', '.join(sorted(types))}: {reason}." for reason, types in refused),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
