"""Does vLLM report to its makers how it is used? Not from here, unless somebody wants it to.

vLLM calls `keep_usage_private` in each of its processes: it is an entry point of the group
`vllm.general_plugins`.
"""

SETTING = "VLLM_NO_USAGE_STATS"


def keep_usage_private() -> None:
    """Switch vLLM's usage reports off in this process, unless the environment decides on them."""
    # Imported here: the entry point is loaded while vllm itself is being imported.
    from vllm import envs

    if not envs.is_set(SETTING):
        setattr(envs, SETTING, True)
