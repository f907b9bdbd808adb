"""Two libraries are in an environment of their own: `make test-tensorflow` runs their tests."""

from importlib.util import find_spec

collect_ignore = [name for name in ("tensorflow", "sklearn") if not find_spec(name)]
