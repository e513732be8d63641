"""Format the report of a campaign of kills as Markdown."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.studies.faults.ranks import STAGES
from benchmarks.tables.render import markdown_grid

HEADERS = (
    "killed during", "kills", "of them rank 0", "with SIGTERM to the others", "steps lost, mean", "most",
    "others ended after s, median", "most",
)  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    stories = report["seeds"]
    cpu = report["environment"]["cpu"]
    parts = [
        "# Ranks killed at random moments",
        f"{cpu['name']}, {cpu['cores']} cores; torch {report['environment']['packages']['torch']}, gloo; "
        f"{report['seconds']:.0f} seconds.",
        f"    {report['command']}",
        _totals(report),
        _stages([kill for story in stories for kill in story["kills"]]),
        _notes(report),
        *([report["note"]] if report["note"] else []),
        *(f"wrong, seed {story['seed']}: {what}" for story in stories for what in story["wrong"]),
    ]
    return "\n\n".join(parts)


def _totals(report: dict[str, Any]) -> str:
    stories = report["seeds"]
    differences = [story["difference"] for story in stories if story["difference"]]

    def worst(name: str) -> str:
        return f"{max((found[name] for found in differences), default=0.0):.1e}"

    body: list[tuple[str, object]] = [
        ("seeds", len(stories)),
        ("kills", sum(len(story["kills"]) for story in stories)),
        ("starts of the command", sum(len(story["sizes"]) for story in stories)),
        ("failures that no kill explains", sum(len(story["unasked"]) for story in stories)),
        (f"steps repeated, of {report['steps'] * len(stories)}", sum(story["repeated"] for story in stories)),
        ("looks at the result files while ranks worked", sum(story["looks"] for story in stories)),
        ("worst difference of a loss term (relative)", worst("terms")),
        ("worst difference of a weight (of the largest of its tensor)", worst("weights")),
        ("evaluation counts that differ", sum(found["counts"] for found in differences)),
        ("**wrong**", f"**{report['wrong']}**"),
    ]
    return markdown_grid(("", ""), [[what, str(found)] for what, found in body], left=1)


def _stages(kills: list[dict[str, Any]]) -> str:
    found = [(stage, [kill for kill in kills if kill["stage"] == stage]) for stage in STAGES]
    return markdown_grid(HEADERS, [_stage(stage, hits) for stage, hits in found if hits], left=1)


def _stage(stage: str, hits: list[dict[str, Any]]) -> list[str]:
    lost = [kill["lost_steps"] for kill in hits]
    ended = [kill["others_seconds"] for kill in hits if kill["size"] > 1] or [0.0]
    return [
        stage,
        str(len(hits)),
        str(sum(kill["rank"] == 0 for kill in hits)),
        str(sum(kill["terminated"] and kill["size"] > 1 for kill in hits)),
        f"{statistics.mean(lost):.1f}",
        str(max(lost)),
        f"{statistics.median(ended):.1f}",
        f"{max(ended):.1f}",
    ]


def _notes(report: dict[str, Any]) -> str:
    methods = sorted({story["method"] for story in report["seeds"]})
    sizes = ", ".join(map(str, report["sizes"]))
    lines = [
        f"- A seed: {report['steps']} steps of mini ({' or '.join(methods)}, SGD, fp32) on digits, then the counts",
        f"  on base and novel classes; a state every {report['state_seconds']:g} s. Repeated starts have {sizes}",
        "  ranks, drawn at random.",
        f"- Ranks wait {report['timeout_seconds']:g} s for each other at most; that is what a rank that dies before",
        "  all have met costs the others where no launcher ends them.",
        "- Compared with one process without kills: few-shot picks, steps, images, learning rates and counts of",
        f"  every class exactly; loss terms within {report['tolerance']['terms']:g}, weights within "
        f"{report['tolerance']['weights']:g}.",
    ]
    return "\n".join(lines)
