"""Access to the server: the area of each route and method, and its conditions."""
