"""What the driver of many runs tells its tracker: all of it, and never behind a backlog."""

from __future__ import annotations

import threading

from cluster.background_sender import BackgroundSender


def test_a_slow_tracker_gets_everything_in_one_more_sending():
    """A hundred reports while the first is being sent are one sending, with every run and the last figures."""
    sent: list[tuple[list[str], dict[str, float]]] = []
    busy, go = threading.Event(), threading.Event()

    def send(runs: list[str], figures: dict[str, float]) -> None:
        sent.append((runs, figures))
        busy.set()
        assert go.wait(120)

    mail = BackgroundSender(send)
    mail.post(["first"])
    assert busy.wait(120)
    for number in range(100):
        mail.post([f"run{number % 7}"], {"done": float(number)})
    go.set()
    mail.close()
    assert sent == [(["first"], {}), ([f"run{number}" for number in range(7)], {"done": 99.0})]
