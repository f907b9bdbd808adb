"""A program that searches a text for a pattern, or checks it against a JSON schema.

A pattern may take exponential time, also one in a schema: a signal ends this process. The standard
input is JSON with `text`, and `pattern` or `schema`; the output is the problem, or nothing. With
`texts` and `redact`, a pattern, the output is a line of JSON for each text, with REDACTED in place
of what matches. It needs only the standard library, and `jsonschema` for schemas.
"""

import json
import re
import signal
import sys
from typing import Any

LIMIT_SECS = 1.0
"""Longest time of a search."""
ABSENT = "is absent"
REDACTED = "[redacted]"


def main() -> None:
    """Read the input, search, and write the output."""
    given = json.load(sys.stdin)
    if "pattern" in given:
        _begin()
        found = "" if re.search(given["pattern"], given["text"]) else ABSENT
    elif "redact" in given:
        _begin()
        pattern = re.compile(given["redact"])
        clean = (pattern.sub(lambda _: REDACTED, each) for each in given["texts"])
        found = "\n".join(map(json.dumps, clean))
    else:
        found = _schema_problem(given["schema"], given["text"])
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.write(found)


def _begin() -> None:
    """Limit the time from now on; imports do not count."""
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECS)


def _schema_problem(schema: Any, text: str) -> str:
    from jsonschema import Draft202012Validator, exceptions, validators
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    _begin()
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"is no JSON: {error}"
    kind = validators.validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
        # An empty registry: a reference to another address is never fetched.
        checked = kind(schema, registry=Registry())
        found = exceptions.best_match(checked.iter_errors(value))
    except (exceptions.SchemaError, Unresolvable, re.error) as error:
        return f"cannot be compared with the schema: {str(error).splitlines()[0]}"
    return "" if found is None else f"does not fit the schema at {found.json_path}: {found.message}"


if __name__ == "__main__":
    main()
