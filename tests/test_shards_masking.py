"""Credentials in any text are masked, and text without one stays as it is."""

from __future__ import annotations

import pytest

from shards.masking import has_secret, is_secret_option, mask

HUSH = "hush-Hush.12"
SECRETS = [
    f"http://me:{HUSH}@host/x",
    f"http://me:{HUSH}@ss@host/x",
    f"http://me:{HUSH}/{HUSH}@host/x",
    f"https://{HUSH}@host/x",
    f"postgresql+psycopg2://me:{HUSH}@db/mlflow",
    f"postgresql://db/mlflow?user=me&password={HUSH}",
    f"https://host/x?a=1&X-Amz-Signature={HUSH}&b=2",
    f"https://host/x?sig={HUSH}",
    f"Authorization: Bearer {HUSH}",
    f"{{'Authorization': 'Basic {HUSH}'}}",
    f"x-header: bearer%20{HUSH}",
    f"AccountName=lab;AccountKey={HUSH};EndpointSuffix=x",
    f"host=db user=me password='{HUSH}'",
    f"Driver={{SQL}};UID=me;PWD={HUSH}",
    f'{{"api_key": "{HUSH}", "steps": 3}}',
    f"option: {{hf_token: {HUSH}}}",
    f"AWS_SECRET_ACCESS_KEY={HUSH}",
    "client_secret=123456",
    "use ghp_0123456789abcdefABCDEF now",
    "id AKIA0123456789ABCDEF",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nhush\n-----END RSA PRIVATE KEY-----",
]
PLAIN = [
    "see http://host:8080/x@y now",
    "['http://host:8080','me@x']",
    "s3://bucket/a@b",
    "http://127.0.0.1:5000/#/experiments/1/runs?searchFilter=tags.method%20IS%20NOT%20NULL",
    "https://drive.google.com/uc?id=3&export=download",
    "deep_tokens=independent n_session_tokens=4 sort_key = lambda x",
    "--option KEY=VALUE",
    "the bearer",
    "password=",
    "password = os.environ['MINE']",
    '{"key": "value", "accuracy": 93.2}',
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_credential_is_masked_once(text: str) -> None:
    masked = mask(text)
    assert has_secret(text) and is_secret_option(text) and HUSH not in masked and "123456" not in masked
    assert "hush" not in masked and "0123456789" not in masked and not has_secret(masked)


@pytest.mark.parametrize("text", PLAIN)
def test_text_without_a_credential_stays_as_it_is(text: str) -> None:
    assert mask(text) == text


@pytest.mark.parametrize("text", ["token=abc", "coop.key=abc", "--option=auth=abc"])
def test_options_have_more_names_of_credentials(text: str) -> None:
    assert is_secret_option(text) and not has_secret(text)
    assert not is_secret_option(f"{text.rpartition('=')[0]}=4")


def test_the_value_of_a_secret_variable_is_masked_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_TOKEN", HUSH)
    monkeypatch.setenv("LAB_TOKEN_PATH", "/run/hidden")
    assert mask(f"a {HUSH} in /run/hidden") == "a *** in /run/hidden"
