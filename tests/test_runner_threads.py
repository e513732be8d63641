"""Small work on a CPU gets one thread, and what the user chose is left alone."""

from __future__ import annotations

import pytest
import torch

from runner.threads import SMALL_PRODUCT, fitting_threads


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("work", ["train", "eval"])
def test_small_work_gets_one_thread_and_large_work_all(tiny_clip, work):
    one = tiny_clip.visual.num_tokens * tiny_clip.geometry.vision_width**2
    enough = -(-SMALL_PRODUCT[work] // one)
    for images, threads in ((1, 1), (enough - 1, 1), (enough, 2)):
        with fitting_threads(tiny_clip, images, work):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2


def test_the_users_choice_stays(tiny_clip, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with fitting_threads(tiny_clip, 1):
        assert torch.get_num_threads() == 2
