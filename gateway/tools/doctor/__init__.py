"""The command `sluice doctor`.

`command` (sections and their order), `report` (findings), `packages`, `runtimes` (backends and
GPUs), `machine` (cores, memory, ports, stored models), `probes` (imports in processes of their
own).
"""
