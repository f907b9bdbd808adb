"""The server inside a program.

`server` (the public class), `options` (keywords to settings), `server_loop` (its event loop),
`handle` (calls from any thread), `model` (handles of models), `request` and `arrays` (inputs),
`responses` (outputs, for threads and tasks).
"""
