"""The page at `/`: `routes` serves it, its files in `assets/`, and the server's state."""
