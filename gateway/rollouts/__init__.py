"""Rollouts: the steps by which a new version of a model takes over from the stable one.

Decisions: `plan` (rollout.json), `rollout` (the state machine), `choice` (the version of each
request), `state` (the state on disk), `model_rollouts` (those of one model, and its loads),
`rollouts` (all rollouts of a server).

Evidence: `guardrails` (predicates on requests, rollout.json), `observation` (one request, by the
tap on its stream), `sequential_test` (the test of two rates), `evidence` (blocks, breaches),
`golden_watch` (golden requests asked again).

Copies of requests: `copying`, `comparison` (of answers), `shadow` (for the candidate),
`golden_recorder` (for golden requests).
"""
