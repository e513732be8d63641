"""What a sweep varies: how it is written, drawn and refused; and the searchers that choose from it."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sweeps.file import read_yaml
from cluster.configuration import check_values
from cluster.job import Report
from cluster.search import Tpe, halving, proposer_for, rungs
from cluster.space import Dimension, Space, digest_of, dimension, dimension_of_text, resolve
from cluster.sweep_record import SweepSettings, TrialRecord
from procap.errors import UsageError

SCALARS = st.one_of(
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text("abcxyz_/-", min_size=1, max_size=8),
)
NUMBERS = st.floats(1e-6, 1e6, allow_nan=False)


def sweep_settings(**changes: object) -> SweepSettings:
    fields: dict[str, object] = {"name": "s", "space": {}, "methods": ("coop",), "datasets": ("digits",), "seeds": (1,)}
    return SweepSettings.model_validate(fields | changes)


def ended(values: dict[str, object], figure: float | None, **changes: object) -> TrialRecord:
    fields: dict[str, object] = {"number": 0, "values": values, "state": "finished", "figure": figure, "epochs": 9}
    return TrialRecord.model_validate(fields | changes)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(SCALARS, st.lists(SCALARS, max_size=3)), min_size=1, max_size=6))
def test_a_list_that_is_typed_is_the_list_of_a_file(values: list[object]) -> None:
    """Of a field that reads none of them as another one."""
    typed = dimension_of_text("pretrained=" + ",".join(json.dumps(value) for value in values), ["coop"])
    assert typed == dimension("pretrained", values, ["coop"])
    assert [json.dumps(value) for value in typed.values] == list(dict.fromkeys(map(json.dumps, values)))


@given(st.sampled_from(["uniform", "log"]), NUMBERS, NUMBERS, st.integers(0, 2**31), st.integers(0, 999))
@settings(max_examples=50, deadline=None)
def test_a_range_is_read_alike_and_draws_inside_itself(kind: str, a: float, b: float, seed: int, number: int) -> None:
    low, high = sorted((a, b))
    one = dimension_of_text(f"lr = {kind}( {low!r}, {high!r} )", ["coop"])
    assert one == dimension("recipe.lr", {kind: [low, high]}, ["coop"]) == dimension("recipe.lr", one.plain(), ["coop"])
    value = one.draw(seed, number)
    assert low <= value <= high and value == one.draw(seed, number)


@settings(max_examples=20, deadline=None)
@given(st.integers(-20, 20), st.integers(0, 30), st.integers(0, 99))
def test_integers_are_whole_and_both_ends_are_reached(low: int, more: int, seed: int) -> None:
    one = dimension_of_text(f"shots=integers({low},{low + more})", ["coop"])
    space = Space((one,))
    found = {values["shots"] for values in space.draws(seed)}
    assert space.size == more + 1
    assert found == set(range(low, low + more + 1))


@settings(max_examples=40, deadline=None)
@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-7, 7).filter(bool))
def test_a_range_is_that_of_python(start: int, stop: int, step: int) -> None:
    wanted = list(range(start, stop, step))
    if wanted:
        assert list(dimension_of_text(f"n_ctx=range({start},{stop},{step})", ["coop"]).values) == wanted
    else:
        with pytest.raises(UsageError, match="no values"):
            dimension_of_text(f"n_ctx=range({start},{stop},{step})", ["coop"])


def test_a_range_of_fractions_has_no_rounding_in_it() -> None:
    assert dimension_of_text("lr=range(0.1,0.6,0.1)", ["coop"]).values == (0.1, 0.2, 0.3, 0.4, 0.5)


@pytest.mark.parametrize(
    ("text", "filed", "values"),
    [
        ("lr=0.1,1,1.0", [0.1, 1], (0.1, 1.0)),
        ("lr=range(1,3)", [1, 2.0], (1.0, 2.0)),
        ("n_ctx=4,4.0,8", [4.0, 8], (4, 8)),
        ("shots=2.0,2,full", [2, "full"], (2, "full")),
        ("grad_clip=null,1,1.0", [None, 1], (None, 1.0)),
        ("betas=[0,0.9],[0.0,0.9]", [[0, 0.9]], ([0.0, 0.9],)),
        ("lr=1,fast", [1.0, "fast"], (1.0, "fast")),
    ],
)
def test_numbers_that_a_field_reads_alike_are_one_value(text: str, filed: list[object], values: tuple[object]) -> None:
    typed = dimension_of_text(text, ["coop"])
    for one in (typed, dimension(typed.field, filed, ["coop"]), dimension(typed.field, typed.plain(), ["coop"])):
        assert [json.dumps(value) for value in one.values] == [json.dumps(value) for value in values]


def test_logarithmic_draws_have_as_many_small_ones_as_large_ones() -> None:
    one = Dimension("recipe.lr", "log", low=1e-6, high=1e-2)
    below = sum(one.draw(3, number) < 1e-4 for number in range(400))
    assert 160 < below < 240


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_random_draws_of_lists_are_the_grid_in_another_order(sizes: list[int], seed: int) -> None:
    space = Space(tuple(Dimension(f"f{i}", "list", tuple(range(size))) for i, size in enumerate(sizes)))
    drawn, grid = [digest_of(values) for values in space.draws(seed)], [digest_of(values) for values in space.grid()]
    assert len(set(drawn)) == len(drawn) == math.prod(sizes) == space.size
    assert sorted(drawn) == sorted(grid)


def test_a_range_narrower_than_the_digits_that_are_drawn_ends() -> None:
    assert len(list(Space((Dimension("recipe.lr", "uniform", low=1.0, high=1.0003),)).draws(0))) == 1


def test_going_on_with_random_draws_gives_the_same_list() -> None:
    space = Space((Dimension("recipe.lr", "log", low=1e-5, high=1e-1), Dimension("options.n_ctx", "list", (2, 4, 8))))
    longer = list(itertools.islice(space.draws(7), 20))
    assert list(itertools.islice(space.draws(7), 5)) == longer[:5]
    assert list(itertools.islice(space.draws(8), 5)) != longer[:5]


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("lr", "recipe.lr"),
        ("recipe.lr", "recipe.lr"),
        ("n_ctx", "options.n_ctx"),
        ("shots", "shots"),
        ("recipe", "recipe"),
    ],
)
def test_plain_names_find_their_field(name: str, field: str) -> None:
    assert resolve(name, ["coop", "maple"]) == field


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("seed", "averaged over all of --seeds"),
        ("seeds", "averaged over all of --seeds"),
        ("classes", "the metric decides"),
        ("learnrate", "unknown field 'learnrate'"),
        ("momentun", "did you mean momentum"),
        ("depth", "no option of coop"),
        ("recipe.n_ctx", "unknown field"),
    ],
)
def test_what_cannot_be_varied_is_said_in_one_line(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        resolve(name, ["coop", "maple"])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    ["lr", "lr=", "=3", "lr=log(0,1)", "lr=log(1,2,3)", "lr=uniform(2,1)", "lr=range(1,5,0)", "lr=integers(0.5,2)",
     "lr=gauss(0,1)", "lr=uniform(a,b)", "lr=1e999", "lr=inf", "betas=[1e999,0.9]", "lr=range(0,1e9)"],
)  # fmt: skip
def test_what_is_no_dimension_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        dimension_of_text(text, ["coop"])


def test_yaml_has_the_numbers_and_words_that_people_mean(tmp_path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("on: ray\nvary:\n  lr: {log: [1e-5, 1e-2]}\n  flip: [true, false]\nstop: off\ntrials: 8\n")
    assert read_yaml(file) == {
        "on": "ray",
        "vary": {"lr": {"log": [1e-5, 1e-2]}, "flip": [True, False]},
        "stop": "off",
        "trials": 8,
    }


def test_rungs_are_before_the_last_epoch() -> None:
    assert rungs(50, 1, 3) == (1, 3, 9, 27)
    assert rungs(9, 1, 3) == (1, 3)
    assert rungs(1, 1, 3) == ()


@pytest.mark.parametrize("reduction", [2, 3, 10])
@pytest.mark.parametrize("grace", [1, 2, 5])
def test_runs_pause_where_halving_decides_and_nowhere_else(grace: int, reduction: int) -> None:
    asha = sweep_settings(stop="asha", grace=grace, reduction=reduction)
    for epochs in range(grace + 1, 260):
        scheduler, _ = halving(asha, epochs, {})
        [bracket] = scheduler._brackets
        assert rungs(epochs, grace, reduction) == tuple(sorted(milestone for milestone, _ in bracket._rungs)), epochs


def told(scheduler: object, trial: str, epoch: int, score: float, state: str = "running") -> str:
    result = Report(epoch=epoch, figures={"score": score}, state=state).flat()  # type: ignore[arg-type]
    return scheduler.on_trial_result(None, SimpleNamespace(trial_id=trial), result)  # type: ignore[attr-defined]


def test_halving_keeps_the_better_ones_and_knows_what_was_known_before() -> None:
    known = {f"old{i}": ended({}, 50 + i, curve={1: 50 + i, 2: 60 + i, 3: 70 + i}) for i in range(4)}
    asha = sweep_settings(search="grid", stop="asha", grace=1, reduction=2)
    scheduler, stopped = halving(asha, 8, known)
    assert not stopped
    for trial in ("good", "bad", "late"):
        scheduler.on_trial_add(None, SimpleNamespace(trial_id=trial))
    assert told(scheduler, "good", 1, 60) == "CONTINUE"
    assert told(scheduler, "bad", 1, 40) == "STOP"
    assert told(scheduler, "late", 1, 60) == "CONTINUE"
    assert told(scheduler, "late", 2, 30) == "STOP"
    assert stopped == {"bad", "late"}


def test_halving_never_stops_what_is_at_its_end() -> None:
    scheduler, stopped = halving(sweep_settings(stop="asha", grace=1, reduction=2), 4, {})
    for number in range(6):
        trial = f"t{number}"
        scheduler.on_trial_add(None, SimpleNamespace(trial_id=trial))
        told(scheduler, trial, 1, 50)
        told(scheduler, trial, 2, 50)
        assert told(scheduler, trial, 4, 50 - number) == "CONTINUE"
        assert told(scheduler, trial, 4, 50 - number, "done") == "CONTINUE"
    assert not stopped


def test_early_stopping_that_can_stop_nothing_is_refused() -> None:
    asked = sweep_settings(stop="asha", grace=2, overrides={"epochs": 2}, space={"recipe.lr": [0.1, 0.2]})
    for search in ("grid", "random"):
        with pytest.raises(UsageError, match="runs have 2"):
            check_values(asked.model_copy(update={"search": search}), None)
    check_values(asked.model_copy(update={"overrides": {"epochs": 3}}), None)


SEARCHED = {"recipe.lr": {"log": [1e-5, 1.0]}, "options.n_ctx": [2, 4, 8]}


def quality(values: dict[str, object]) -> float:
    return 80 - 10 * abs(math.log10(float(values["recipe.lr"])) + 2)  # type: ignore[arg-type]


def test_tpe_finds_the_better_half_and_never_repeats_itself() -> None:
    tpe = Tpe(sweep_settings(space=SEARCHED).searched(), sweep_settings(space=SEARCHED, search="tpe", search_seed=3))
    found = []
    for _ in range(30):
        values = tpe.ask()
        assert values is not None
        found.append(values)
        tpe.told(ended(values, quality(values)))
    assert len({digest_of(values) for values in found}) == 30
    first, last = found[:10], found[20:]
    assert sum(map(quality, last)) / 10 > sum(map(quality, first)) / 10 + 2


def test_tpe_goes_on_from_what_is_known_and_learns_from_it() -> None:
    tpe_settings = sweep_settings(space=SEARCHED, search="tpe", search_seed=3)
    known = [ended(values, quality(values)) for values in itertools.islice(tpe_settings.searched().draws(1), 20)]
    stopped = ended({"recipe.lr": 1.0, "options.n_ctx": 8}, 1.0, state="stopped", curve={1: 0.5, 2: 1.0})
    failed = ended({"recipe.lr": 0.9, "options.n_ctx": 8}, None, state="failed")
    tpe = Tpe(tpe_settings.searched(), tpe_settings)
    for record in (*known, stopped, failed):
        tpe.told(record)
    asked = [tpe.ask() for _ in range(8)]
    assert all(values is not None for values in asked)
    assert not {digest_of(one.values) for one in known} & {digest_of(values) for values in asked if values}
    mean = sum(one.figure for one in known if one.figure) / len(known)
    assert sum(quality(values) for values in asked if values) / len(asked) > mean


@pytest.mark.parametrize("search", ["grid", "random", "tpe"])
def test_every_searcher_ends_when_there_is_nothing_left(search: str) -> None:
    space = {"options.n_ctx": [2, 4, 8], "recipe.flip": [True, False]}
    proposer = proposer_for(sweep_settings(space=space, search=search))
    known = {"options.n_ctx": 4, "recipe.flip": True}
    proposer.told(ended(known, 50.0))
    found = []
    while (values := proposer.ask()) is not None:
        found.append(values)
        proposer.told(ended(values, 50.0))
    assert len(found) == 5 and known not in found
