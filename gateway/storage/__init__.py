"""Models stored on this machine.

`store` (the folder of models), `embedded` (models inside pip packages), `fetch` (the command),
`unpacking` (conversion of package files in a process of its own).
"""
