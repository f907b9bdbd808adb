"""Simulation of a fleet in virtual time, with the router's real choice and prefix index.

`workload` makes or reads the requests, `engine` is a simulated replica, `fleet` runs requests with
routers, `policies` has the rules of other routers, `command` compares them, `times` measures the
real choice among 1,000 replicas.
"""
