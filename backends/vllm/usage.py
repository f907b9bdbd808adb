"""The plugin of vLLM that disables its usage reports.

vLLM calls `keep_usage_private` in each of its processes: it is an entry point of the group
`vllm.general_plugins`.
"""

SETTING = "VLLM_NO_USAGE_STATS"


def keep_usage_private() -> None:
    """Disable vLLM's usage reports in this process, unless the environment variable is set."""
    # Imported here: the entry point is loaded during the import of vllm.
    from vllm import envs

    if not envs.is_set(SETTING):
        setattr(envs, SETTING, True)
