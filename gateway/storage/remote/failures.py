"""Codes and words of failed requests, read out of the texts of obstore's errors.

Those texts have URLs with queries and values of files: only what is named here is repeated.
"""

import re

SLOW_DOWN = {"SlowDown", "ServerBusy", "TooManyRequests", "OperationTimedOut", "429", "503"}
REFUSED = {
    "401",
    "403",
    "AccessDenied",
    "AuthenticationFailed",
    "AuthorizationFailure",
    "AuthorizationPermissionMismatch",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "NoAuthenticationInformation",
    "PublicAccessNotPermitted",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "Unauthenticated",
}
"""Codes after which credentials are read again."""

RIGHTS = "give the credentials the right to list and read it, or use others"
KEYS = "check the key and its secret"
BUCKET = "create it, or correct the address"
CLOCK = "set the clock of this machine"
TOKEN = "renew the session token"
LATER = "try again later, or with fewer requests at once"
REGION = "set AWS_DEFAULT_REGION to the region of the bucket"
REACH = "check that the storage runs, and its endpoint in the address"
FIXES = {
    "403": RIGHTS,
    "AccessDenied": RIGHTS,
    "AuthorizationPermissionMismatch": RIGHTS,
    "AuthenticationFailed": KEYS,
    "AuthorizationFailure": KEYS,
    "AuthorizationHeaderMalformed": REGION,
    "CannotConnect": REACH,
    "ContainerNotFound": BUCKET,
    "ExpiredToken": TOKEN,
    "HostNotFound": "check the host in the address, and DNS",
    "Interrupted": LATER,
    "InvalidAccessKeyId": KEYS,
    "InvalidPath": "rename or delete that key",
    "NoSuchBucket": BUCKET,
    "PermanentRedirect": REGION,
    "RequestTimeTooSkewed": CLOCK,
    "SignatureDoesNotMatch": KEYS,
    "Timeout": LATER,
    "TokenRefreshRequired": TOKEN,
    "Unauthenticated": KEYS,
    **dict.fromkeys(SLOW_DOWN, LATER),
}

STATUS = re.compile(r"status code: (\d{3})")
CODE = re.compile(r"<Code>([^<]*)</Code>")
MESSAGE = re.compile(r"<Message>([^<\n]*)")
KIND = re.compile(r"kind: (Connect|Timeout|Request|Interrupted|Decode|Body)\b")
CODES = {"Connect": "CannotConnect", "Timeout": "Timeout"}
VALUE = re.compile(r"""https?://\S+|"[^"\n]*"|'[^'\n]*'|(?<!\S)/\S+""")
BAD_KEY = re.compile(r'(?:path: |Path )("(?:[^"\\]|\\.)*")')


def code_of(error: Exception) -> str:
    """The storage's code of the failure, or else ours, or the status."""
    text = str(error)
    if found := CODE.search(text) or STATUS.search(text):
        return found[1]
    if '"dns error"' in text:
        return "HostNotFound"
    if found := KIND.search(text):
        return CODES.get(found[1], "Interrupted")
    return type(error).__name__.removesuffix("Error")


def words_of(error: Exception) -> str:
    """The storage's own message, the key that cannot be a file, or obstore's words."""
    text = str(error)
    if found := MESSAGE.search(text):
        return found[1].rstrip(".")
    if STATUS.search(text) or KIND.search(text):
        return ""
    if code_of(error) == "InvalidPath" and (found := BAD_KEY.search(text)):
        return f"the key {found[1]} is no path of a file"
    return VALUE.sub("...", text.partition("\n")[0].rstrip("."))


def explained(what: str, error: Exception) -> str:
    """The whole text of a failure: status, code, message and fix."""
    code = code_of(error)
    status = STATUS.search(str(error))
    found = code if status is None or status[1] == code else f"{status[1]} {code}"
    words = ": ".join(part for part in (f"cannot {what}", found, words_of(error)) if part)
    return f"{words}; {FIXES[code]}" if code in FIXES else words
