"""Golden requests: recorded requests that a version answers as expected before it serves.

Read in this order: `reading` (files of the folder `golden/`), `data` (values in JSON or NPZ),
`tensor_checks` and `text_checks` (comparisons), `search` (patterns and schemas, in a process of
their own), `similarity` (texts compared by a loaded model), `answer` (the responses of a request),
`run` (execution on a new instance), `recorded` (golden requests made of clients' requests).
"""
