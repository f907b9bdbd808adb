"""Rollouts: a new version of a model gets its requests in steps.

Evidence: `guardrails` (predicates on requests, rollout.json), `observation` (one request, by the
tap on its stream), `sequential_test` (the test of two rates), `evidence` (blocks, breaches).
"""
