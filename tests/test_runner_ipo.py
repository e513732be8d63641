"""IPO: a search over prompt templates from a file, and from a language model behind a server of this test."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import torch
from sessions import evaluate, load_trained, train
from small_runs import make_runtime

from procap.errors import UsageError, UserError
from procap.methods import build_method
from procap.methods.features import FeatureBank
from procap.methods.ipo import IPOOptions, make_request
from procap.teacher import text_bank
from procap.text import LabelSpace
from runner.config import Target
from runner.planning import plan_run

ANSWERS = [
    "a drawing of a <CLASS>",
    "I cannot do that.",
    'Sure!\n"the  number <CLASS>."',
    f"a {'very ' * 90}<CLASS>",
    "a photo of a <CLASS>.",
]
KEY = "sk-of-this-test"


class Model(BaseHTTPRequestHandler):
    """Gives the next answer to each request but the first, for which it is busy, and keeps the requests."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        if len(self.server.requests) == 1:
            self.send_response(429)
            self.end_headers()
            return
        if body["model"] == "moved":
            self.send_response(307)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            return
        text = "No." if body["model"] == "mute" else ANSWERS[(len(self.server.requests) - 2) % len(ANSWERS)]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": text}}]}).encode())

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture(scope="module")
def server():
    with HTTPServer(("127.0.0.1", 0), Model) as server:
        server.requests = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def plan(short_checkpoint):
    def make(**options):
        return plan_run(method="ipo", dataset="digits", backbone=str(short_checkpoint), shots=1, options=options)

    return make


def test_a_search_is_stored_with_the_run_and_replays_without_the_endpoint(
    server, plan, few_digits, tmp_path, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    runtime, address = make_runtime(few_digits, tmp_path), f"http://127.0.0.1:{server.server_port}/v1"
    config = plan(endpoint=address, model="words", rounds=2, candidates=3, threshold=0)
    train(config, runtime)
    assert len(server.requests) == 1 + 6
    for path, key, body in server.requests:
        assert (path, key, body["model"]) == ("/v1/chat/completions", f"Bearer {KEY}", "words")
    first, last = (server.requests[at][2]["messages"][0]["content"] for at in (0, -1))
    assert "a drawing of a <CLASS>" not in first and "a drawing of a <CLASS>\naccuracy" in last
    log = tmp_path / config.path / "proposals.json"
    scores = json.loads(log.read_text())
    assert [*scores] == ["a photo of a {}.", "a drawing of a {}", "the number {}."]
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]

    again = plan(proposals=str(log))
    train(again, runtime)
    assert again.hash != config.hash and str(tmp_path) not in json.dumps(again.identity())
    assert (tmp_path / again.path / "proposals.json").read_text() == log.read_text()
    digest = hashlib.sha256(log.read_bytes()).hexdigest()
    assert json.loads((tmp_path / again.path / "train.json").read_text())["files"] == {"proposals": digest}
    methods = [load_trained(each, runtime).method for each in (config, again)]
    best = max(scores, key=lambda template: (scores[template]["accuracy"], -scores[template]["cross_entropy"]))
    assert [bytes(method.template_bytes.tolist()).decode() for method in methods] == [best, best]
    assert round(scores[best]["accuracy"]) in range(20, 101, 20), "in percent, of five images"
    # What was found is zero-shot CLIP with that template, on new classes as well.
    method = methods[0]
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    text = text_bank(method.clip, method.space, [best])
    features = torch.nn.functional.normalize(method.clip.encode_image(images))
    torch.testing.assert_close(method.classifier()(images), method.scale() * features @ text.t())
    assert evaluate(again, Target("digits", "novel"), runtime).total == 30


@pytest.mark.parametrize(("threshold", "shown"), [(20, ["37", "38", "39"]), (38, ["38", "39"])])
def test_a_request_shows_the_best_templates_from_the_threshold_on_and_the_best_last(threshold, shown):
    scores = {f"{accuracy} {{}}": (float(accuracy), -1.0) for accuracy in reversed(range(40))}
    request = make_request(LabelSpace(("cat", "dog")), scores, IPOOptions(threshold=threshold, shown=3))
    assert re.findall(r"(\d+) <CLASS>\naccuracy", request) == shown


def test_the_template_with_the_highest_accuracy_and_then_the_lowest_loss_is_kept(plan, few_digits, tmp_path):
    file = tmp_path / "digits.txt"
    file.write_text("a bad photo of the {}.\n\nan origami <CLASS>\nitap of a {}.\n")
    config = plan(proposals=str(tmp_path / "{dataset}.txt"), start="a photo of a <CLASS>.")
    train(config, make_runtime(few_digits, tmp_path))
    scores = json.loads((tmp_path / config.path / "proposals.json").read_text())
    assert [*scores] == ["a photo of a {}.", "a bad photo of the {}.", "an origami {}", "itap of a {}."]
    best = max(scores, key=lambda template: (scores[template]["accuracy"], -scores[template]["cross_entropy"]))
    method = load_trained(config, make_runtime(few_digits, tmp_path)).method
    assert bytes(method.template_bytes.tolist()).decode() == best
    assert len({score["cross_entropy"] for score in scores.values()}) == 4


def test_of_equal_accuracies_the_lower_loss_counts_and_one_process_asks(tiny_clip, tiny_space):
    def built(**options):
        return build_method("ipo", tiny_clip, tiny_space, options, torch.Generator())

    method = built(proposals="templates")
    method.scores |= {"a photo of a {}.": (50.0, -2.0), "the {}": (50.0, -1.0), "a {}": (40.0, -0.5)}
    method.fit(FeatureBank(*[torch.empty(0)] * 4))
    assert bytes(method.template_bytes.tolist()) == b"the {}"
    asking = built(endpoint="http://host/v1", model="words")
    asking.group = SimpleNamespace(size=2)
    with pytest.raises(UsageError, match="one process asks an endpoint"):
        asking.prepare_training()


def test_what_is_no_source_of_templates_is_refused(server, plan, few_digits, tmp_path):
    runtime, address = make_runtime(few_digits, tmp_path), f"http://127.0.0.1:{server.server_port}"
    (tmp_path / "wrong.txt").write_text("a photo\n")
    for options, message in (
        ({"proposals": str(tmp_path / "wrong.txt")}, "'a photo' needs exactly one"),
        ({"proposals": str(tmp_path / "no.txt")}, "one template a line is needed"),
        ({"endpoint": f"{address}/v1", "model": "moved"}, "gives no answer of moved"),
        ({"endpoint": f"{address}/v1", "model": "mute", "rounds": 1}, "mute at .* proposes no new template"),
    ):
        with pytest.raises(UserError, match=message):
            train(plan(**options), runtime)
    for options in (
        {"endpoint": address},
        {"endpoint": "http://me:secret@host/v1", "model": "words"},
        {"start": "a {"},
    ):
        with pytest.raises(UsageError):
            plan(**options)
    assert {path for path, _, _ in server.requests} == {"/v1/chat/completions"}, "no key goes where a redirect leads"
    with pytest.raises(UsageError, match="needs --option proposals"):
        train(plan(), runtime)
