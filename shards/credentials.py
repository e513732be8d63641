"""Mask credentials in what is printed, logged or sent to MLflow."""

from __future__ import annotations

import os
import re

MASK = "***"
MIN_LENGTH = 8
"""Shortest value of an environment variable that is searched in texts: shorter ones are also words."""
SECRET_VARIABLE = re.compile(r"(SECRET|PASSWORD|PASSWD|CREDENTIALS?|TOKEN|KEY|PASS|PAT|DSN)$", re.IGNORECASE)
# In abfs://container@account no user is named, unless a password follows.
USER = re.compile(r"(?<=://)(?:(?<!abfs://)(?<!abfss://)|(?=[^/\s@]*:))[^/\s@\"'?#]{1,500}@")
SIGNATURE = re.compile(
    r"(?<=[?&])(X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|sig|token|access_token"
    r"|api_key|key|password)=[^&\s\"'#<>]+",
    re.IGNORECASE,
)
"""Matches query parameters of the signed URLs of S3, Google Cloud Storage and Azure, and of common APIs."""


def mask_urls(text: str) -> str:
    """Remove users from URLs, and replace signatures of signed URLs by `***`."""
    return SIGNATURE.sub(rf"\g<1>={MASK}", USER.sub("", text))


def mask(text: str) -> str:
    """Replace credentials in a message: those of URLs, and values of secret environment variables by `***`.

    Results have names that may equal such a value: they get `mask_urls` alone. A variable is secret if its name ends
    like one (`HF_TOKEN`, `AWS_SECRET_ACCESS_KEY`), unless its value is a path.
    """
    for name, value in os.environ.items():
        if len(value) >= MIN_LENGTH and value in text and SECRET_VARIABLE.search(name) and not value.startswith("/"):
            text = text.replace(value, MASK)
    return mask_urls(text)
