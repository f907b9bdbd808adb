"""The server inside a program.

`server` (the public class and handles of models), `options` (keywords to settings), `server_loop`
(its event loop, and calls from any thread), `request` (inputs), `responses` (outputs,
for threads and tasks).
"""
