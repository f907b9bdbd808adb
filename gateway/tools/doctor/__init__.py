"""The command `sluice doctor`.

`command` (sections and their order), `report` (findings), `packages`, `runtimes` (backends and
GPUs), `machine` (cores, memory, ports, stored models), `exposure` (a running server as strangers
see it), `probes` (imports in processes of their own).
"""
