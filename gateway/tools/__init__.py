"""Commands that the server never imports.

`check` (verdicts on configurations), `draft` (configurations of model files), `chat` (a client at
the terminal), `doctor` (an examination of the machine), `label` (names of versions; its requests
are those of `management`), `record` (golden requests from clients' requests).
"""
