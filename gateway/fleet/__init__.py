"""A fleet: a router answers requests for models that replicas on other machines host.

In reading order:

- `handshake`: the first frames of a connection, and the proof of the secret
- `offers`: the models of a replica, its loads and its prefixes, as it announces them
- `meter`: the load of one model of a replica, and the prefixes that its engine holds
- `announcer`: the announcements of loads and prefixes
- `bulk`: the connection of large tensors, besides that of messages
- `large`: messages with large tensors, as the ends of a call send and receive them
- `replica`: the port of a replica, and the requests of its routers
- `answer`: the answer to one of them
- `reaching`: the start of a router's connections to a replica
- `connection`: a router's connection to one replica
- `directory`, `ray_addresses`: the addresses of replicas, from a list, DNS or a child process
- `choice`: the replica that gets a request, and the requests that move to another one
- `prefixes`: keys of prompts and pins, those that a replica holds, and the index of a router
- `metrics`: the counts of a router
- `traces`: the traces of a request at both ends
- `prompts`: the prompts of one model in a router
- `moves`: the requests of one model that may move
- `repeatable`: the models whose requests may be executed twice
- `placement`: the choice among the connections, and those of sequences
- `waiting`: the requests of a model that wait for a first replica
- `instance`: the instance of a model that replicas host
- `status`: the description of a fleet at `/v2/fleet`, and its metrics
- `router`: the connections of a router, and the models that it has from them
- `scaling`: the number of replicas that a model needs
- `ray_views`, `ray_repository`: replicas on Ray as the controller sees them, and their models
- `ray_controller`, `rolls`: the decisions on them, also while a changed model is rolled out
- `ray_news`: the news between routers and the controller
- `ray_replica`, `ray_cluster`: the process of a replica, and those of a fleet in a Ray cluster
- `ray_directory`, `ray_command`: the child process of a router with Ray, and `sluice fleet`
"""
