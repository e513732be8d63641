"""Suites as their commands leave them, and a page of a report as a tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

from made_results import put_config, put_score

from benchmarks.experiment.profiles import MINI
from benchmarks.results.suite_results import write_plan
from benchmarks.suites import load_suite
from runner.run_collection import Collection, write_collection

VOID = {"meta", "img", "br", "hr", "input", "link", "col", "wbr"}


@dataclass
class Node:
    tag: str
    attributes: dict[str, str]
    children: list[Node | str] = field(default_factory=list)

    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text() for child in self.children)

    def all(self, *tags: str) -> list[Node]:
        inner = [child for child in self.children if isinstance(child, Node)]
        return [found for child in inner for found in ([child] if child.tag in tags else []) + child.all(*tags)]


class Page(HTMLParser):
    """The tree of a page; a tag that is closed in the wrong place is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self._open = [self.root]
        self.feed(text)
        self.close()
        assert self._open == [self.root], f"never closed: {[node.tag for node in self._open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}> at {self.getpos()}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def put_entry(results, entry, share=0.75):
    """The run of an entry and its evaluations, of 200 images each."""
    config = put_config(results, entry.spec.config)
    for number, target in enumerate(entry.spec.targets):
        put_score(results, config, target, round(200 * share) - number, 200)
    return config


def begin(results, name, **chosen):
    """A suite's collection, as its command leaves it: every run of the plan, none of them done."""
    suite = load_suite(name)
    options = suite.options(MINI, quick=True, **chosen)
    entries = suite.plan(options)
    runs = tuple(dict.fromkeys(entry.path for entry in entries))
    moments = {"status": "finished", "started": 1_700_000_000_000, "ended": 1_700_000_090_000}
    settings = options.to_json()
    write_plan(results / "collections" / "suite" / suite.name, options, entries)
    write_collection(results, Collection(kind="suite", name=suite.name, runs=runs, settings=settings, **moments))
    return options, entries


def every(node: Node) -> list[Node]:
    inner = [child for child in node.children if isinstance(child, Node)]
    return inner + [found for child in inner for found in every(child)]


def tables(tree: Node) -> dict[str, Node]:
    """The tables of a page by title."""
    named = {node.attributes["id"]: words_of(node) for node in every(tree) if "id" in node.attributes}
    return {named[table.attributes["aria-labelledby"]].partition(". ")[2]: table for table in tree.all("table")}


def words_of(node: Node) -> str:
    return " ".join(node.text().split())
