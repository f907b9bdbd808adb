"""Models stored on this machine, and repositories in object storage.

`store` (the folder of models), `fetch` (models inside pip packages, and the command), `unpacking`
(conversion of package files in a process of its own), `remote` (addresses, credentials, objects),
`mirror` (remote repositories as folders of this machine).
"""
