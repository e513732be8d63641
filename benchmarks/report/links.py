"""Where the runs of a suite are in MLflow: a command for everybody, addresses where a server is known."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report.read import Found
from runner.collection import CollectionFolder
from runner.tracking.outbox import Delivery, delivery_of
from runner.tracking.store import Destination


@dataclass(frozen=True)
class Link:
    title: str
    address: str


def command(found: Found, results: str) -> str:
    """What shows the suite's runs in MLflow on this machine."""
    return shlex.join(["procap", "ui", "--results", results, "--suite", found.suite.name])


def links(found: Found, results: Path, tracking: str) -> list[Link]:
    """Pages of the server at `tracking` that have the suite or its runs; nothing is asked of the server.

    tracking: an http address, default that of the environment; any other store has no pages. What was never sent there
    has no link.
    """
    destination = Destination.choose(results, tracking or None)
    if not destination.is_server:
        return []
    address = destination.address.rstrip("/")
    found_links = []
    parent = delivery_of(CollectionFolder(results / found.collection.path).path, destination.label)
    if parent:
        found_links.append(Link("the suite", f"{address}/#/experiments/{parent.experiment_id}/runs/{parent.run_id}"))
    sent = _sent(found, results, destination)
    if sent:
        from benchmarks.cli.ui import Chosen, charts_page, compare_page

        chosen = Chosen(sent, f"tags.`{found.collection.tag}` = 'yes'")
        found_links.append(Link(f"charts of {len(sent)} runs", charts_page(address, chosen)))
        if side_by_side := compare_page(address, chosen):
            found_links.append(Link(f"{len(sent)} runs side by side", side_by_side))
    return found_links


def _sent(found: Found, results: Path, destination: Destination) -> list[Delivery]:
    deliveries = (delivery_of(results / run.path, destination.label) for run in found.runs if run.training)
    return [delivery for delivery in deliveries if delivery]
