"""Domains of a sweep: how they are written, refused, and what Ray Tune makes of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.run import Halving
from cluster.space import parse_param, resolve_field, round_value, to_tune, value_between
from procap.errors import UsageError

SCALARS = st.one_of(
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text("abcxyz_/-", min_size=1, max_size=8),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(SCALARS, st.lists(SCALARS, max_size=3)), min_size=1, max_size=6))
def test_a_list_is_read_value_by_value(values: list[object]) -> None:
    field, domain = parse_param("pretrained=" + ",".join(json.dumps(value) for value in values), ["coop"])
    assert field == "pretrained" and isinstance(domain, list)
    assert domain == [value for number, value in enumerate(values) if value not in values[:number]]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=0.1,1,1.0", [0.1, 1]),
        ("n_ctx=4,4.0,8", [4, 8]),
        ("shots=2.0,2,full", [2.0, "full"]),
        ("grad_clip=null,1,1.0", [None, 1]),
        ("betas=[0,0.9],[0.0,0.9]", [[0, 0.9]]),
        ("lr=1,fast", [1, "fast"]),
    ],
)
def test_numbers_that_a_field_reads_alike_are_one_value(text: str, values: list[object]) -> None:
    assert json.dumps(parse_param(text, ["coop"])[1]) == json.dumps(values)


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("lr = loguniform( 1e-5, 1e-2 )", {"loguniform": [1e-5, 1e-2]}),
        ("lr=uniform(0,1)", {"uniform": [0.0, 1.0]}),
        ("lr=quniform(0,1,0.25)", {"quniform": [0.0, 1.0, 0.25]}),
        ("n_ctx=randint(1,10)", {"randint": [1, 10]}),
    ],
)
def test_distributions_are_those_of_ray_tune(text: str, domain: dict[str, list[float]]) -> None:
    assert parse_param(text, ["coop"])[1] == domain
    ((_, (low, high, *_)),) = domain.items()
    drawn = [round_value(domain, to_tune(domain).sample()) for _ in range(20)]
    assert all(low <= value <= high for value in [*drawn, value_between(domain)]) and len(set(drawn)) > 3
    assert to_tune([1, 2], grid=True) == {"grid_search": [1, 2]} and to_tune([1, 2]).categories == [1, 2]


@pytest.mark.parametrize(
    ("name", "field"),
    [("lr", "recipe.lr"), ("recipe.lr", "recipe.lr"), ("n_ctx", "options.n_ctx"), ("shots", "shots")],
)
def test_plain_names_find_their_field(name: str, field: str) -> None:
    assert resolve_field(name, ["coop", "maple"]) == field


@pytest.mark.parametrize(
    ("name", "message"),
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
def test_fields_that_cannot_be_varied_are_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        resolve_field(name, ["coop", "maple"])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    ["lr", "lr=", "=3", "lr=loguniform(0,1)", "lr=loguniform(1,2,3)", "lr=uniform(2,1)", "lr=quniform(0,1,0)",
     "lr=randint(0.5,2)", "lr=gauss(0,1)", "lr=uniform(a,b)", "lr=uniform(0,inf)"],
)  # fmt: skip
def test_what_is_no_domain_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_param(text, ["coop"])


@pytest.mark.parametrize("reduction", [2, 3, 10])
@pytest.mark.parametrize("grace", [1, 2, 5])
def test_runs_pause_where_asha_decides_and_not_at_their_end(grace: int, reduction: int) -> None:
    from ray.tune.schedulers import ASHAScheduler

    for epochs in range(grace + 1, 240):
        scheduler = ASHAScheduler(max_t=epochs, grace_period=grace, reduction_factor=reduction)
        [bracket] = scheduler._brackets
        milestones = sorted(milestone for milestone, _ in bracket._rungs if milestone < epochs)
        assert Halving(grace, reduction).rungs(epochs) == tuple(milestones), epochs
