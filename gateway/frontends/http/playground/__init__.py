"""The page at `/`.

`routes` (the page and its files), `state` (the server's state that the page shows).
"""
